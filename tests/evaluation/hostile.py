"""Programs that try to be counted as right, to get out, or to stay. All must fail.

Every program "solves" HumanEval/0's signature in its own way; `{host}` is a folder of the host.
"""

PROGRAMS = {
    "early_exit": "import os\nos._exit(0)",
    "exit_when_called": "def f(*a):\n    import os\n    os._exit(0)",
    "frames": """
def f(*a):
    import sys
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for value in list(scope.values()):
                if isinstance(value, dict) and 'nonce' in value:
                    import os, json
                    for fd in range(64):
                        try:
                            os.write(fd, json.dumps({'done': value['nonce']}).encode() + b'\\n')
                        except OSError:
                            pass
        frame = frame.f_back
""",
    "forged_messages": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'{"done": ""}\\n{"done": "0"}\\n' * 50)
    except OSError:
        pass
def f(*a): return None
""",
    "patched_builtins": """
import builtins
builtins.AssertionError = type('Never', (BaseException,), {})
builtins.isinstance = lambda *a: True
builtins.exec = lambda *a: None
def f(*a): return 'x'
""",
    "read_host_files": """
def f(*a):
    import glob
    found = []
    for name in ['/etc/passwd', '/etc/shadow', '/proc/1/environ', '{host}/secret.txt']:
        try:
            found.append(open(name).read())
        except OSError:
            pass
    if found:
        return 'right'
    return None
""",
    "write_outside": """
def f(*a):
    import os
    for name in ['{host}/left.txt', '/tmp/left.txt', '/usr/left.txt', '/runner/x.py', '/left.txt']:
        try:
            open(name, 'w').write('here')
            return 'right'
        except OSError:
            pass
""",
    "network": """
def f(*a):
    import socket
    for address in [('127.0.0.1', {port}), ('1.1.1.1', 53)]:
        try:
            socket.create_connection(address, 0.3)
            return 'right'
        except OSError:
            pass
""",
    "fork_bomb": """
import os
def f(*a):
    while True:
        try:
            os.fork()
        except OSError:
            pass
""",
    "allocate_8_gb": """
def f(*a):
    block = bytearray(8 << 30)
    return 'right'
""",
    "endless_output": """
import sys
while True:
    print('x' * 10000)
    sys.stderr.write('y' * 10000)
""",
    "signals": """
def f(*a):
    import os, signal
    for pid in [0, -1, 1, os.getppid(), *range(2, 400)]:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                if pid != os.getpid():
                    os.kill(pid, number)
            except (OSError, PermissionError):
                pass
""",
    "daemon": """
def f(*a):
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(64):
                try:
                    os.close(fd)
                except OSError:
                    pass
            time.sleep(1000)
        os._exit(0)
""",
    "handle_of_the_tests": """
def f(*a):
    import os
    for fd in range(64):
        try:
            os.lseek(fd, 0, 0)
            if b'nonce' in os.read(fd, 1 << 16):
                return 'right'
        except OSError:
            pass
""",
}
