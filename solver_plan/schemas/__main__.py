"""Write the schema of each kind of problem and plan beside this file."""

from solver_plan.documents import write_text
from solver_plan.documents.schema import FOLDER, schema_name, schema_text
from solver_plan.kinds import plan_types, problem_types

for kind, problem_type in problem_types().items():
    write_text(schema_text(problem_type), FOLDER / schema_name(kind, "problem"))
for kind, plan_type in plan_types().items():
    write_text(schema_text(plan_type), FOLDER / schema_name(kind, "plan"))
