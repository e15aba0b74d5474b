"""Lower bounds that know when predecessors end: the allotment program over buckets of time, by HiGHS.

The allotment program lets a component use the devices while its predecessors still run. Here the time up to the latest
end C is cut into B buckets of equal length C / B, and layers are dealt out over them.

Further variables: y_ckb >= 0 layers of c that run in choice k in bucket b, fractions of a layer included; z_cb in
{0, 1} component c, which has successors, has ended by the end of bucket b. The constraints of the allotment program,
and

    sum_b y_ckb = x_ck                                                                   every layer in some bucket
    sum_k t_ck y_ckb <= C / B                                                            one layer after another
    sum_ck n_ck t_ck y_ckb <= N C / B                                                    area of a bucket
    sum_{k, a <= b} y_cka >= L_c z_cb,  z_cb <= z_c,b+1,  sum_k y_ckb <= L_c (1 - z_c,b-1)        c has ended
    sum_k y_dkb <= L_d z_cb,  sum_k t_ck y_ckb + sum_k t_dk y_dkb <= C / B  for (c, d) in E       d waits for c

Every plan gives a solution with its own C: y from what runs when, z_cb = 1 if c ends by the end of b; where d has begun
in bucket b, c has ended in it or before. Only plans no longer than the incumbent matter: C + R is at most its objective
U, which fixes z_cb = 0 where c cannot have ended at (b + 1) U / B, and z_cb = 1 where (b + 1) / B >= 1 - tail_c / U.

Layers x may be fractions: the buckets say more than whole layers. Fused phases only, since with a backward both ends of
the plan belong to the first components.
"""

import pulp

from solver_plan.solving import Clock, solve_milp
from solver_plan.wavefront.bounds import AllotmentProgram, Bound, heads_and_tails
from solver_plan.wavefront.instance import Instance

INTEGRALITY_MARGIN = 2e-5
"""Relative; HiGHS takes 1e-6 for 0, and that much of z lets a few layers run early."""
MOST_COMPONENTS = 80
BUCKETS = (8, 12)
"""Few buckets are quick, more say more."""
WORTH_MORE = 1e-3
"""Gain of few buckets, relative, from which more are tried."""


def suits_buckets(instance: Instance) -> bool:
    """Tell whether the program over buckets may say more than the allotment program."""
    return any(instance.successors) and not instance.two_phases and len(instance.layers) <= MOST_COMPONENTS


def bucket_bound(
    instance: Instance,
    clock: Clock,
    buckets: int,
    objective_ms: float,
    *,
    limit: float | None = None,
    node_limit: int | None = None,
) -> Bound:
    """Return the bound of the program over buckets, at most the objective of the incumbent.

    See `allotment_bound` for the limits.
    """
    built = AllotmentProgram(instance, whole=False)
    program = built.program
    program += built.latest + built.reduction <= objective_ms
    heads, tails = heads_and_tails(instance)
    length = built.latest * (1.0 / buckets)
    time: list[list[pulp.LpAffineExpression]] = []
    layers: list[list[pulp.LpAffineExpression]] = []
    areas: list[list[pulp.LpAffineExpression]] = [[] for _ in range(buckets)]
    for c in instance.components:
        dealt = [
            [pulp.LpVariable(f"y_{c}_{k}_{b}", 0, instance.layers[c]) for b in range(buckets)]
            for k in range(len(instance.choices[c]))
        ]
        for x, each in zip(built.layers[c], dealt, strict=True):
            program += pulp.lpSum(each) == x
        by_bucket = list(zip(*dealt, strict=True))
        choices = instance.choices[c]
        layers.append([pulp.lpSum(here) for here in by_bucket])
        time.append(
            [
                pulp.LpAffineExpression([(y, k.layer_ms) for y, k in zip(here, choices, strict=True)])
                for here in by_bucket
            ]
        )
        for area, here in zip(areas, by_bucket, strict=True):
            terms = [(y, k.devices * k.layer_ms) for y, k in zip(here, choices, strict=True)]
            area.append(pulp.LpAffineExpression(terms))
        for spent in time[c]:
            program += spent <= length
    for area in areas:
        program += pulp.lpSum(area) <= instance.devices * length
    for c in instance.components:
        if not instance.successors[c]:
            continue
        total = instance.layers[c]
        soonest = heads[c] + instance.shortest_ms(c)
        ended = []
        for b in range(buckets):
            possible = soonest <= (b + 1) / buckets * objective_ms * (1 + INTEGRALITY_MARGIN)
            certain = (b + 1) / buckets >= 1 - tails[c] / objective_ms * (1 - INTEGRALITY_MARGIN)
            ended.append(pulp.LpVariable(f"z_{c}_{b}", int(certain), int(possible or certain), pulp.LpInteger))
        for b in range(buckets):
            program += pulp.lpSum(layers[c][: b + 1]) >= total * ended[b]
            if b:
                program += ended[b - 1] <= ended[b]
                program += layers[c][b] <= total * (1 - ended[b - 1])
            for d in instance.successors[c]:
                program += layers[d][b] <= instance.layers[d] * ended[b]
                program += time[c][b] + time[d][b] <= length
    outcome = solve_milp(program, clock, limit=limit, gap_limit=1e-4, node_limit=node_limit)
    # no solution: no plan is shorter than the incumbent
    proven = objective_ms if outcome.status == "infeasible" else outcome.bound
    value = None if proven is None else min(objective_ms, proven) * (1 - INTEGRALITY_MARGIN)
    return Bound(value_ms=value, source=f"milp:{buckets}-buckets", layers=None)
