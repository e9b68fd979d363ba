"""Run a probe that ends with the process PROCESS: `python -m bundle.preflight PROCESS MODULE WORDS`."""

import runpy
import sys

from bundle.launch import orphans

if __name__ == "__main__":
    process, module, *words = sys.argv[1:]
    orphans.prepare_death_with_parent()(int(process))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
