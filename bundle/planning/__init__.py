"""The plan of a job before it runs: layout, memory, patches, environment, and the problems that stop it."""

from bundle.planning.output import to_json, to_text
from bundle.planning.plan import MegatronVersion, Plan, assemble_plan, build_plan
from bundle.planning.problems import Problem, to_hardware_problem, to_recipe_problem

__all__ = [
    "MegatronVersion",
    "Plan",
    "Problem",
    "assemble_plan",
    "build_plan",
    "to_hardware_problem",
    "to_json",
    "to_recipe_problem",
    "to_text",
]
