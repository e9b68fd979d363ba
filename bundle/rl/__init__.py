"""Reinforcement learning: advantages of answers and objectives of the policy."""
