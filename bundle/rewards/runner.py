"""Runs an answer and then its tests, as the program in a sandbox: python -c THIS_TEXT CHANNEL REQUEST.

On the file descriptor CHANNEL it sends REQUEST, gets the answer, runs it, and sends REQUEST before each test.
A test is followed by a token, which stays in the socket until the test has passed. Then it is sent back. The
answer's code shares this process, so names that it may replace are bound before it runs.
"""

import os
import sys
from types import ModuleType


def run_answer_and_tests() -> None:
    """Answer messages until there are no more; each has its length in eight digits before it."""
    channel, request = int(sys.argv[1]), sys.argv[2].encode()
    read, write, leave, fork, wait = os.read, os.write, os._exit, os.fork, os.waitpid
    run, translate, get_pid = exec, compile, os.getpid
    pid, length_of, to_text, to_int = get_pid(), len, bytes.decode, int

    def read_exactly(size: int) -> bytes:
        content = b""
        while length_of(content) < size:
            piece = read(channel, size - length_of(content))
            if not piece:
                leave(0)
            content += piece
        return content

    def receive() -> bytes:
        return read_exactly(to_int(read_exactly(8)))

    sys.argv[:] = ["answer.py"]
    module = sys.modules["answer"] = ModuleType("answer")
    write(channel, request)
    run(translate(to_text(receive()), "answer.py", "exec", 0, True), module.__dict__)
    if get_pid() != pid:  # the answer's code has forked
        leave(0)
    while True:
        write(channel, request)
        message = receive()
        while message[:1] != b"t":  # the token of a test that did not pass
            message = receive()
        process = fork()
        if process == 0:
            try:
                run(translate(to_text(message[1:]), "tests.py", "exec", 0, True), module.__dict__)
                write(channel, receive()[1:])
            finally:
                leave(0)
        wait(process, 0)


if __name__ == "__main__":
    run_answer_and_tests()
