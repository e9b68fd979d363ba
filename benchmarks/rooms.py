"""Measure `make test ROOM=...`, the quick tests of each room. Ends with 1 where a room takes more than 60 s.

python -m benchmarks.rooms [ROOM...]
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 60.0
_NO_TESTS = 5  # the exit code of pytest for a room whose tests all start ranks or processes


def main(rooms: list[str]) -> int:
    named = rooms or sorted(path.parent.name for path in (ROOT / "tests").glob("*/__init__.py"))
    print("| room | seconds |\n|---|---|")
    failed = []
    for room in named:
        begin = time.perf_counter()
        done = subprocess.run(
            ["make", "--silent", "test", f"ROOM={room}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - begin
        print(f"| {room} | {seconds:.0f} |", flush=True)
        if seconds > MOST_SECONDS or (done.returncode and f"Error {_NO_TESTS}" not in done.stderr):
            failed.append(f"{room}: {seconds:.0f} s, code {done.returncode}\n{done.stdout[-2000:]}")
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
