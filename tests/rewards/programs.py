"""Answers that do harm, or claim to be right, for the tests of the reward code."""

# None of them has what the tests ask for; each tells so in its own way, or hides it.
CHEATS = {
    "leaves": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "prints": "print('ok')\nprint('1 passed')",
    "raises": "raise SystemExit('passed')",
    "leaves_in_the_test": "import os\ndef add(a, b): os._exit(0)",
    "exits_in_the_test": "def add(a, b): raise SystemExit",
    "writes_everywhere": (
        "import os\nfor fd in range(64):\n  for text in (b'ok\\n', b'passed\\n', b'.' * 32, b'0' * 32):\n"
        "    try: os.write(fd, text)\n    except OSError: pass"
    ),
    "closes_everything": "import os\nos.closerange(0, 200)",
    "replaces_exec": (
        "import builtins, os\nbuiltins.exec = builtins.compile = lambda *words: None\n"
        "os._exit = lambda code: None\nos.write = lambda fd, data: len(data)"
    ),
    "forks": "import os\nos.fork()",
    "kills_itself": "import os\nos.kill(os.getpid(), 9)",
    "kills_its_parent": "import os\nos.kill(os.getppid(), 9)",
    "is_not_python": "Here is the function that you asked for:",
    "has_a_null_byte": "x = '\0'",
    "is_deep": "x = " + "(" * 10_000,
    "is_wrong": "def add(a, b): return a - b + 1",
    "has_a_closed_block_without_it": "def add(a, b): return a + b\n```python\npass\n```",
}

# Each runs into a limit; the kernel or the sandbox ends all of them.
HARMS = {
    "endless_loop": "while True: pass",
    "endless_sleep": "import time\ntime.sleep(600)",
    "much_memory": "pages = bytearray(10 * 2**30)",
    "memory_of_a_child": (
        "import os\nif os.fork() == 0: pages = bytearray(10 * 2**30)\nos.wait()\nraise SystemExit"
    ),
    "fork_bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "daemon": (
        "import os, time, signal\n"
        "for _ in range(2):\n  if os.fork(): os._exit(0)\n  os.setsid()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.closerange(0, 200)\ntime.sleep(600)"
    ),
    "daemon_of_another_program": (
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nraise SystemExit"
    ),
    "much_output": (
        "import os, sys\nfor _ in range(2000): os.write(1, b'x' * 2**20); os.write(2, b'x' * 2**20)\n"
        "raise SystemExit"
    ),
    "large_file": "with open('x', 'wb') as file: file.truncate(2**30)",
    "speaks_much": "import os\nwhile True: os.write(3, b'x' * 2**16)",
    "ignores_signals": (
        "import signal, time\n"
        "for number in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)\n"
        "time.sleep(600)"
    ),
    "memory_without_end": "pages = []\nwhile True: pages.append(bytearray(2**24))",
    "threads_without_end": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()"
    ),
}
