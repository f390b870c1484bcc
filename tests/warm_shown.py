"""What ``test_warm.py`` starts: it tells what it sees, or starts itself and waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def main() -> int:
    if sys.argv[1] == "parent":
        child = subprocess.Popen([sys.executable, "-m", "tests.warm_shown", "wait"])
        print(child.pid, flush=True)
    if sys.argv[1] != "say":
        time.sleep(120)
    os.write(int(sys.argv[3]), b"kept")
    found = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "mark": os.environ.get("MARK"),
        "read": sys.stdin.readline(),
        "main": sys.modules["__main__"].__spec__.name,
        "imported": "torch" in sys.modules,
    }
    print(json.dumps(found))
    print("to stderr", file=sys.stderr)
    return 7


if __name__ == "__main__":
    sys.exit(main())
