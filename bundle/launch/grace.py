"""How long a job may take from being told to save to its end, which schedulers wait for before they kill."""

from bundle.launch.job import Job

# The step that is under way, the agreement of the ranks, and a file system that is busy.
_LEAST_SECONDS = 300
# What one node writes to a shared file system at the least, while all of them do; a choice, not measured.
_BYTES_PER_SECOND = 250e6


def estimate_save_seconds(job: Job) -> int:
    """Seconds that a job may need to save: with the time for a checkpoint of the size that its plan says."""
    size = job.plan.get("checkpoint", {}).get("bytes", 0)
    return _LEAST_SECONDS + int(size / (_BYTES_PER_SECOND * job.nodes))
