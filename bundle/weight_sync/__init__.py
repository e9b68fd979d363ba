"""Brings new weights to rollout servers: what is sent, how it travels, and in which order a server takes it.

Nothing here knows a server's protocol: `rollouts` has the servers.
"""
