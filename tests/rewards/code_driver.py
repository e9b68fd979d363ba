"""Judges answers by the reward code without the package: code_driver.py SECONDS [[answer, tests], ...]."""

import importlib.util
import json
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "bundle/rewards/code.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("reward_code", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        judge = module.CodeJudge(float(sys.argv[1]), 1.0)
    except module.SandboxError as error:
        print(json.dumps({"error": str(error)}))
        return
    rewards = [judge.judge(answer, tests) for answer, tests in json.loads(sys.argv[2])]
    print(json.dumps({"notice": judge.notice, "rewards": rewards}))


if __name__ == "__main__":
    main()
