"""The time from the request to save to the end of a job, which a scheduler must wait before it kills."""

from bundle.launch.job import Job

# For the current step, the agreement of the ranks, and a busy file system.
_BASE_SAVE_SECONDS = 300
# The lowest rate of one node on a shared file system while all nodes write; a choice, not measured.
_BYTES_PER_SECOND = 250e6


def estimate_save_seconds(job: Job) -> int:
    """Return the time that a job may need to save [s], from the size of its planned checkpoint."""
    size = job.plan.get("checkpoint", {}).get("bytes", 0)
    return _BASE_SAVE_SECONDS + int(size / (_BYTES_PER_SECOND * job.nodes))
