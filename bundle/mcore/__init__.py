"""Version-adapted access to the real megatron-core, 0.12 to the newest.

What a release names differently is settled here, by what its signatures accept, never by its version number.
Private names are reached through their module at call time, so that an applied patch is always met.
"""
