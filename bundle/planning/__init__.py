"""All that will happen, before it happens: layout, memory, patches, environment, and what is against it."""

from bundle.planning.output import to_json, to_text
from bundle.planning.plan import Plan, Target, plan_for, plan_on
from bundle.planning.problems import Problem, hardware_problem, recipe_problem

__all__ = [
    "Plan",
    "Problem",
    "Target",
    "hardware_problem",
    "plan_for",
    "plan_on",
    "recipe_problem",
    "to_json",
    "to_text",
]
