"""The verbs of the command line, one module each.

A new verb is a module with a `Verb` and a line here. These modules are imported for ``--help``: they import only
argparse, errors and each other at the top, everything else where it runs.
"""

from solver_plan.commands.check import CHECK
from solver_plan.commands.compile import COMPILE
from solver_plan.commands.export import EXPORT
from solver_plan.commands.import_problem import IMPORT
from solver_plan.commands.plan import PLAN
from solver_plan.commands.profile import PROFILE
from solver_plan.commands.run import RUN
from solver_plan.commands.schema import SCHEMA
from solver_plan.commands.show import SHOW
from solver_plan.commands.simulate import SIMULATE
from solver_plan.commands.verb import Verb

VERBS: tuple[Verb, ...] = (IMPORT, PROFILE, PLAN, CHECK, SHOW, SIMULATE, COMPILE, RUN, EXPORT, SCHEMA)
