"""Whether this machine and what is installed on it can run a job: findings with a cause and a fix each."""

from bundle.health.examination import examine
from bundle.health.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
