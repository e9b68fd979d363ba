"""Who speaks first of a hang: the watchdog, whose limit differs with what is done, or a collective."""

import pytest

from bundle.distributed import watchdog


@pytest.mark.parametrize("seconds", [1, 60, 600, 4000, 86_400])
def test_a_collective_waits_longer_than_the_watchdog_needs_to_end_the_job(tmp_path, seconds):
    """Even one that began before the patience, in which another rank hangs."""
    dog = watchdog.Watchdog(seconds, tmp_path, 0, 0)
    with dog.extend_patience("saving step 3"):
        longest = dog._get_seconds_left()
    ends = seconds + longest + watchdog._CHECK_INTERVAL_SECONDS + watchdog._LINGER_SECONDS
    assert watchdog.compute_collective_timeout(seconds) > ends
