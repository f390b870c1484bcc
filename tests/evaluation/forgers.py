"""Programs without a single answer that try to be counted as right by HumanEval's tests.

Those of `WIRE` answer the tests' messages themselves, in the runner's place; those of `VALUES`
return objects whose methods lie. `ENTRY` stands for the name that the tests want.
"""

_TAKE_THE_WIRE = """
import json, os, sys, time
frame = sys._getframe()
while 'writer' not in frame.f_locals:
    frame = frame.f_back
writer, reader = frame.f_locals['writer'], frame.f_locals['reader']
def say(line):
    writer.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b'\\n')
    writer.flush()
def hear():
    line = b''
    while not line.endswith(b'\\n'):
        piece = reader.read(65536)
        if not piece:
            os._exit(0)
        line += piece
    return json.loads(line)
NAMES = ['ENTRY', 'abs', 'range', 'set', 'tuple', 'math', 'sorted', 'len', 'all', 'isinstance',
         'poly', 'encode_cyclic', 'encode_shift', 'check', 'candidate', '__builtins__', 'print']
ZERO = {'f': (0.0).hex()}
def serve(answer):
    while True:
        say(answer(hear()))
"""


def _wire(loaded: str, answers: str) -> str:
    return f"{_TAKE_THE_WIRE}\nsay({loaded})\n{answers}\n"


_EMPTY = "{'value': {'l': []}}"

WIRE = {
    "names_of_the_tests": _wire(
        "{'value': {'d': [[n, {'i': hex(i)}] for i, n in enumerate(NAMES)]}}",
        "serve(lambda m: {'value': ZERO})",
    ),
    "one_handle_for_all": _wire(_EMPTY, "serve(lambda m: {'value': {'o': '0x0'}})"),
    "yes": _wire(_EMPTY, "serve(lambda m: {'value': True})"),
    "endings_of_loops": _wire(_EMPTY, "serve(lambda m: {'error': ['StopIteration', '']})"),
    "the_last_word": _wire(
        _EMPTY, "for word in ('', '0'):\n    say({'done': word})\nserve(lambda m: {'done': ''})"
    ),
    "before_loading": "import os\nfor fd in range(3, 9):\n    try:\n        os.write(fd, "
    'b\'{"value": {"l": []}}\\n\' * 9)\n    except OSError:\n        pass\n'
    "def ENTRY(*a): return 0",
    "late": _wire(_EMPTY, "serve(lambda m: time.sleep(60) or {'value': ZERO})"),
    "trickle": _wire(
        _EMPTY,
        "hear()\nfor byte in b'{\"value\": ' + b' ' * 10000:\n"
        "    os.write(writer.fileno(), bytes([byte]))\n    time.sleep(0.01)",
    ),
    "huge": _wire(_EMPTY, "serve(lambda m: {'value': {'l': [None] * (1 << 20)}})"),
    "deep": _wire(
        _EMPTY, "serve(lambda m: b'{\"value\": ' + b'[' * 100000 + b']' * 100000 + b'}')"
    ),
    "unknown_tags": _wire(_EMPTY, "serve(lambda m: {'value': {'__class__': 'tuple'}})"),
    "unhashable": _wire(_EMPTY, "serve(lambda m: {'value': {'s': [{'l': []}]}})"),
}  # fmt: skip

_LYING = """
class Lie(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __len__(self): return 1
    def __bool__(self): return True
    def __iter__(self): return iter(())
    def __abs__(self): return 0.0
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__
    def __float__(self): return 0.0
    def __int__(self): return 0
    __index__ = __int__
    def __str__(self): return ''
    __repr__ = __str__
    def __getattr__(self, name): return lambda *a, **k: True
def ENTRY(*a, **k):
    return Lie()
"""

VALUES = {
    f"lying_{base}": _LYING.replace("BASE", base)
    for base in ("float", "str", "list", "object")
} | {
    "raises_the_end": "def ENTRY(*a):\n    raise StopIteration",
    "its_argument": "def ENTRY(*a): return a[0] if a else None",
    "later_builtins": "import builtins\nfor name in ('abs', 'set', 'tuple', 'sorted', 'range'):\n"
    "    setattr(builtins, name, lambda *a: 0)\ndef ENTRY(*a): return 0.0",
}  # fmt: skip

FORGERS = WIRE | VALUES
