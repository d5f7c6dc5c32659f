# ruff: noqa: E501 - programs as texts
"""Unit tests of `code`: honest programs of many kinds pass, and programs that forge the verdict do not."""

from __future__ import annotations

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import score
from hpc_grpo.rewards.sandbox import plain
from tests.support.isolation import needs_isolation

HONEST = {
    "numbers": ("def f(x):\n    return 2 * x", "assert f(4) == 8\nassert f(2**80) == 2**81\nassert f(1j) == 2j"),
    "a check of HumanEval": (
        "def below_zero(operations):\n    total = 0\n    for each in operations:\n        total += each\n"
        "        if total < 0: return True\n    return False",
        "METADATA = {'author': 'a'}\n\ndef check(candidate):\n    assert candidate([]) == False\n"
        "    assert candidate([1, 2, -4]) is True, 'message'\n\ncheck(below_zero)",
    ),
    "floats": (
        "import math\ndef root(x): return math.sqrt(x)\ndef nothing(): return float('nan')",
        "import math\nassert math.isclose(root(2), 1.4142135, rel_tol=1e-6)\nassert abs(root(3) - 1.7320508) < 1e-6\n"
        "assert math.isnan(nothing()) and round(root(2), 2) == 1.41",
    ),
    "containers": (
        "from collections import Counter, OrderedDict, defaultdict, deque\n"
        "def f(x): return {'list': [x, (x, [x])], 'set': {x}, 'frozen': frozenset({x}), 'none': None, 'b': b'\\xff'}\n"
        "def count(x): return Counter(x)\ndef queue(): return deque([1, 2])\n"
        "def order():\n    d = defaultdict(list); d['a'].append(1); return d",
        "assert f(1) == {'list': [1, (1, [1])], 'set': {1}, 'frozen': frozenset({1}), 'none': None, 'b': b'\\xff'}\n"
        "assert isinstance(f(1), dict) and isinstance(f(1)['list'], list)\nassert count('aab') == {'a': 2, 'b': 1}\n"
        "assert list(queue()) == [1, 2] and order() == {'a': [1]}\nassert set(f('é\\ud800')['set']) == {'é\\ud800'}",
    ),
    "generators": (
        "def gen(n):\n    for i in range(n):\n        got = yield i\n        if got: yield got\ndef squares(n): return map(lambda x: x * x, range(n))",
        "assert list(gen(3)) == [0, 1, 2]\ng = gen(2)\nassert next(g) == 0 and g.send('x') == 'x'\n"
        "assert sorted(squares(3), reverse=True) == [4, 1, 0]\nassert [a + b for a, b in zip(gen(2), gen(2))] == [0, 2]",
    ),
    "classes": (
        "class Stack:\n    def __init__(self, *items): self.items = list(items)\n    def push(self, x): self.items.append(x); return self\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        "    def __eq__(self, other): return self.items == other.items\n    def __getitem__(self, i): return self.items[i]\n"
        "    def __contains__(self, x): return x in self.items\n    def __repr__(self): return f'Stack{self.items}'\n"
        "class Sub(Stack): pass",
        "s = Stack(1)\ns.push(2).push(3)\nassert len(s) == 3 and list(s) == [1, 2, 3] and s.items == [1, 2, 3]\n"
        "assert s == Stack(1, 2, 3) and s != Stack() and s[0] == 1 and 2 in s and s\nassert not Stack()\n"
        "assert isinstance(Sub(), Stack) and issubclass(Sub, Stack) and not isinstance(s, Sub)\n"
        "assert repr(s) == 'Stack[1, 2, 3]' and hasattr(s, 'push') and not hasattr(s, 'pull')\ns.items = []\nassert len(s) == 0",
    ),
    "objects given back": (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef longest(pairs): return max(p.b - p.a for p in pairs)",
        "assert longest([Pair(5, 24), Pair(39, 60)]) == 21\np = Pair(1, 2)\np.b = p\nassert p.b is p",
    ),
    "exceptions": (
        "class Mine(ValueError):\n    def __init__(self, text, code): super().__init__(text); self.code = code\n"
        "def f(x):\n    if x < 0: raise Mine('no ' + str(x), 7)\n    return {}[x]\ndef parse(x):\n    import json; return json.loads(x)",
        "import json\ntry:\n    f(-1)\nexcept Mine as error:\n    assert str(error) == 'no -1' and error.code == 7\nelse:\n    assert False\n"
        "for kind in (ValueError, Mine, Exception):\n    try: f(-1)\n    except kind: pass\ntry: f(3)\nexcept KeyError as error: assert error.args == (3,)\n"
        "try: parse('{')\nexcept json.JSONDecodeError: pass\nelse: assert False",
    ),
    "pytest.raises": (
        "def f(x): raise ZeroDivisionError('by 0')",
        "import pytest\nwith pytest.raises(ZeroDivisionError, match='by'):\n    f(1)",
    ),
    "arguments changed in place": (
        "def sort(x): x.sort()\ndef fill(d, s, b): d['k'] = [1]; s.add(2); b.append(65)\ndef same(x): return x",
        "a = [3, 1, 2]\nassert sort(a) is None and a == [1, 2, 3]\nd, s, b = {}, set(), bytearray()\nfill(d, s, b)\n"
        "assert (d, s, b) == ({'k': [1]}, {2}, bytearray(b'A'))\nassert same(a) is a\nloop = []\nloop.append(loop)\nassert same(loop) is loop",
    ),
    "deep recursion": (
        "def nest(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x\ndef fact(n): return 1 if n < 2 else n * fact(n - 1)",
        "import math\nx = nest(3000)\nfor _ in range(3000): [x] = x\nassert x == []\nassert fact(500) == math.factorial(500)",
    ),
    "printing": (
        "def hello(name): print('Hello', name); return len(name)",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    assert hello('Ada') == 3\nassert out.getvalue() == 'Hello Ada\\n'",
    ),
    "functions as arguments": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef by(key, xs): return sorted(xs, key=key)\ndef compose(f, g): return lambda x: f(g(x))\n"
        "def deco(f):\n    def inner(*a): return f(*a) + 1\n    return inner",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]\nassert by(len, ['aa', 'b']) == ['b', 'aa']\nassert compose(str, abs)(-3) == '3'\n"
        "@deco\ndef g(x): return x\nassert g(1) == 2\nassert apply(str.upper, ['a']) == ['A'] and apply(int, (c for c in '12')) == [1, 2]",
    ),
    "objects of the tests": (
        "def total(node):\n    return 0 if node is None else node.value + total(node.next)\ndef relabel(node): node.value = 9",
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "n = Node(1, Node(2))\nassert total(n) == 3\nrelabel(n)\nassert n.value == 9",
    ),
    "numpy": (
        "import numpy as np\ndef double(x): return 2 * np.asarray(x)\ndef mean(x): return np.mean(x)\ndef fill(x): x[:] = 7",
        "assert np.allclose(double([1, 2.5]), np.array([2, 5]))\nassert mean(np.array([1, 2])) == 1.5 and (double(np.eye(2)) == 2 * np.eye(2)).all()\n"
        "a = np.zeros(3)\nfill(a)\nassert a.sum() == 21",
    ),
    "imports of the program": (
        "from fractions import Fraction\nfrom decimal import Decimal\nfrom datetime import date, timedelta\nfrom collections import namedtuple\nfrom enum import Enum\n"
        "P = namedtuple('P', 'x y')\nclass Color(Enum):\n    RED = 1\n"
        "def half(): return Fraction(1, 2)\ndef price(): return Decimal('1.10')\ndef day(): return date(2024, 2, 28) + timedelta(1)\ndef point(): return P(1, 2)",
        "from solution import point as p, Color\nimport solution\nimport datetime, decimal\nassert half() == 0.5 and price() == decimal.Decimal('1.1')\n"
        "assert day() == datetime.date(2024, 2, 29) and p() == (1, 2) and p().x == 1\nassert Color.RED is solution.Color.RED and Color.RED.value == 1",
    ),
    "operators": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass V:\n    x: int\n    def __add__(self, o): return V(self.x + o.x)\n    def __neg__(self): return V(-self.x)",
        "assert V(1) + V(2) == V(3) and -V(1) == V(-1) and V(1) < V(2) and V(1) != 1\nassert sorted([V(2), V(1)])[0].x == 1",
    ),
    "a function called like a builtin": ("def sum(a, b): return a + b", "a = 10\nassert sum(a, 15) == 25"),
    "functions for pytest": (
        "def f(x): return 2 * x\ndef nothing():\n    for _ in (): yield",
        "import pytest\nfrom solution import *\nCASES = dict(a=1)\ndef test_one(): assert f(1) == 2\n"
        "async def test_two(case=2): assert f(case) == 4\ndef test_more(fixture): assert False\n"
        "def test_end():\n    with pytest.raises(StopIteration): next(nothing())\n"
        "if __name__ == '__main__': pytest.main()",
    ),
    "functions that the tests call": (
        "def f(x): return 2 * x",
        "calls = []\ndef test_one(): calls.append(f(1))\ntest_one()\nassert calls == [2]",
    ),
    "unittest": (
        "def f(x): return 2 * x",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
        "suite = unittest.defaultTestLoader.loadTestsFromTestCase(T)\n"
        "assert unittest.TextTestRunner().run(suite).wasSuccessful()",
    ),
    "unittest.main": (
        "def f(x): return 2 * x",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nunittest.main()",
    ),
    "unittest.main for a script": (
        "def f(x): return 2 * x",
        "from unittest import TestCase, main\nclass T(TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
        "if __name__ == '__main__': main()",
    ),
    "hashes": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n    def __hash__(self): return hash(self.x)\n"
        "def points(): return {P(1), P(2)}\ndef loops(node):\n    seen = set()\n    while node not in seen and node: seen.add(node); node = node.next\n    return bool(node)",
        "assert hash(P(1)) == hash(P(1)) and len({P(1), P(1), P(2)}) == 2 and {P(1): 3}[P(1)] == 3 and P(2) in points()\n"
        "class Node: next = None\na, a.next = (n := Node()), Node()\nassert not loops(n)\nn.next.next = n\nassert loops(n)",
    ),
    "special attributes": (
        "import sys\ndef f():\n    'doc'\n    sys.exit(3)\nclass A:\n    def __init__(self): self.x = 1",
        "assert f.__doc__ == 'doc' and A.__doc__ is None and vars(A()) == A().__dict__ == {'x': 1}\n"
        "try: f()\nexcept SystemExit as error: assert error.code == 3\nelse: assert False",
    ),
    "many numbers": (
        "def same(x): return x\ndef last(x): return x[-1]\ndef drop(x): x.pop()",
        "for x in ([0.5] * 300, list(range(300)), [True] * 300, [2 ** 63] * 300, [1, 2.5] * 300, [float('inf')] * 300):\n"
        "    kind, y = type(x[-1]), list(x)\n    assert same(x) is x == y and type(last(x)) is kind and {*map(type, same(tuple(x)))} == {*map(type, x)}\n"
        "    drop(x)\n    assert x == y[:-1]",
    ),
    "limits of time": (
        "import resource\ndef limits(): return resource.getrlimit(resource.RLIMIT_CPU)",
        "import resource\nassert limits() == (20, 20) and resource.getrlimit(resource.RLIMIT_CPU) == (60, 60)",
    ),
    "context managers and coroutines": (
        "import contextlib\n@contextlib.contextmanager\ndef opened(x): yield [x]\nasync def later(x): return x + 1",
        "import asyncio\nwith opened(3) as x:\n    assert x == [3]\nassert asyncio.run(later(1)) == 2",
    ),
    "files": (
        "def save(x):\n    with open('x.txt', 'w') as f: f.write(x)",
        "save('abc')\nassert open('x.txt').read() == 'abc'",
    ),
}


@needs_isolation
@pytest.mark.parametrize("kind", HONEST)
def test_honest_programs_pass_and_without_a_program_the_same_tests_fail(kind: str) -> None:
    program, tests = HONEST[kind]
    assert score("code", [program, "pass"], {"tests": tests}, args={"time_s": 20.0}, timeout_s=90.0) == [1.0, 0.0]


ALWAYS_EQUAL = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __mul__ = __rmul__ = __sub__
    def __abs__(self): return 0.0
    def __hash__(self): return 0
    def __bool__(self): return True
    def __getattr__(self, name): return lambda *a, **k: True
"""
FORGED = {
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *a, **k: None\nbuiltins.compile = lambda *a, **k: None",
    "an object that equals all": f"{ALWAYS_EQUAL}\ndef f(x): return Always()",
    "a number that equals all": "class N(float):\n    __eq__ = lambda *a: True\n    __hash__ = None\n    __sub__ = __rsub__ = lambda *a: 0.0\ndef f(x): return N(0)",
    "the tests in a frame": """
import sys
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        if isinstance(value, dict) and 'tests' in value: value['tests'] = 'pass'
    frame = frame.f_back""",
    "math.isclose": "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0.0",
    "a false numpy": """
import sys, types
numpy = types.ModuleType('numpy')
numpy.allclose = numpy.isclose = numpy.array_equal = lambda *a, **k: True
numpy.array = numpy.asarray = lambda x: x
sys.modules['numpy'] = numpy
np = numpy
def f(x): return 0.0""",
    "abs and round": "def abs(x): return 0\ndef round(*a): return 0\ndef all(x): return True\ndef f(x): return 9.0",
    "the token of the verdict in a frame": """
import os, sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and 'token' in value:
            os.write(int(os.environ['VERDICT_FD']), value['token'].encode())
            os._exit(0)
    frame = frame.f_back""",
    "the verdict's descriptor": """
import os
for descriptor in range(256):
    for text in (b'passed', b'1.0'):
        try: os.write(descriptor, text)
        except OSError: pass
for name in ('VERDICT_FD',): os.environ.get(name)
os._exit(0)""",
    "another compile": """
import builtins
compile_ = builtins.compile
builtins.compile = lambda source, *a, **k: compile_('pass', *a, **k)""",
    "leaving with 0": "import os, atexit\natexit.register(os._exit, 0)\nimport sys\nsys.exit(0)",
    # Six more.
    "the memory of the tests": """
import os
for pid in os.listdir('/proc'):
    for name in ('mem', 'fd/3'):
        try:
            with open(f'/proc/{pid}/{name}', 'r+b', buffering=0) as file: file.write(b'passed')
        except (OSError, ValueError): pass
def f(x): return 0""",
    "an interrupt that the tests catch": "import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGINT)\n    return 0",
    "the tests' module": "import sys, types\nfor name in ('tests', '__main__', 'plain'):\n    sys.modules[name] = types.ModuleType(name)\ncheck = lambda *a: None\ndef f(x): return 0",
    "a message of its own": """
import os, json
def f(x):
    for descriptor in range(4, 20):
        data = json.dumps({'values': {'nodes': [['yours', 0]], 'roots': [[0], False], 'same': []}, 'printed': ''}).encode()
        try: os.write(descriptor, data + b'\\n')
        except OSError: pass
    return 0""",
    "an array that is always close": f"{ALWAYS_EQUAL}\n    __array__ = lambda self, *a, **k: Always()\n    __array_ufunc__ = __array_function__ = lambda *a, **k: True\ndef f(x): return Always()",
    "an importer of false modules": """
import sys, types
for name in ('math', 'numpy'): sys.modules.pop(name, None)
class Finder:
    def find_spec(self, name, *a):
        if name in ('math', 'numpy'):
            import importlib.machinery
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec): return types.ModuleType(spec.name)
    def exec_module(self, module): module.isclose = module.allclose = lambda *a, **k: True
sys.meta_path.insert(0, Finder())
def f(x): return 0""",
    "a function of the tests gives their values away": """
def f(x, probe=None):
    if probe is None: return 0
    for name in ('__globals__', '__code__', '__closure__', '__self__', 'gi_frame'):
        try: return getattr(probe, name)['expected']
        except Exception: pass
    return 0""",
}
TESTS = {
    "equal": "assert f(2) == 4",
    "close": "import math\nassert math.isclose(f(2), 1.4142135, rel_tol=1e-6)",
    "difference": "assert abs(f(2) - 1.4142135) < 1e-6",
    "numpy": "import numpy as np\nassert np.allclose(f(2), [1.0, 4.0])",
    "check": "def check(candidate):\n    for _ in range(2):\n        assert candidate(2) == 4\ncheck(f)",
    "caught": "expected = 4\ntry:\n    got = f(2)\nexcept BaseException:\n    got = None\nassert got == expected",
    "function": "expected = 4\nassert f(2, lambda: expected) == 4",
}


@needs_isolation
@pytest.mark.parametrize("forgery", FORGED)
def test_forged_verdicts_score_nothing(forgery: str) -> None:
    program = FORGED[forgery]
    passed = {
        name for name, tests in TESTS.items() if score("code", [program], {"tests": tests}, timeout_s=90.0) != [0.0]
    }
    assert passed == set()


OPERATIONS = """
import sys
frame = sys._getframe()
while 'operations' not in frame.f_locals: frame = frame.f_back
operations = frame.f_locals['operations']
lookup = operations['lookup']
def f(x): return 0.0
"""
"""The program's process is the program's: it may answer the tests as it likes."""
CLOSE = "assert abs(f(2) - 1.4142135) < 1e-6"
UNITTEST = HONEST["unittest"][1]
FORGED_FOR = {
    "an abs that nobody asked for": (
        f"{OPERATIONS}operations['lookup'] = lambda names: {{**lookup(names), 'abs': lambda x: 0}}",
        CLOSE,
    ),
    "builtins of its own": (
        f"{OPERATIONS}import builtins\nclass Fake:\n    def __getattr__(self, name): return lambda *a, **k: True\n"
        "own = {**{k: v for k, v in vars(builtins).items() if isinstance(v, type)}, '__import__': lambda *a: Fake()}"
        "\noperations['lookup'] = lambda names: {**lookup(names), '__builtins__': own}",
        TESTS["close"],
    ),
    "names that it puts into the question": (
        f"{OPERATIONS}def answer(names):\n    found = lookup(names)\n    names[:] = [*names, 'abs']\n"
        "    return {**found, 'abs': lambda x: 0}\noperations['lookup'] = answer",
        CLOSE,
    ),
    "a function that is there once its abs has been taken": (
        "import threading\nabs = lambda x: 0\ndef late(): globals()['f'] = lambda x: 0.0\n"
        "threading.Timer(0.3, late).start()",
        f"import time\ntime.sleep(1)\nfrom solution import f\n{CLOSE}",
    ),
    "another math by import *": (
        "class math: isclose = lambda *a, **k: True\ndef f(x): return 0.0",
        "import math\nfrom solution import *\nassert math.isclose(f(2), 1.4142135)",
    ),
    "an end of iteration": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda case: f(case[0]) == case[1], [(2, 4)]))",
    ),
    "a number that is large and then small": (
        "class F(float):\n    size = [1e9]\n    def __float__(self): self.size[0] *= -1; return -self.size[0]\n"
        "def f(x): return F()",
        "assert 1.41 < f(2) < 1.42",
    ),
    "an object whose hash and comparison fit": (
        f"{ALWAYS_EQUAL}\nAlways.__hash__ = lambda self: 4\ndef f(x): return Always()",
        "assert f(2) in {4: 'x'}",
    ),
    "cases of unittest that fail unseen": (
        "def f(x): return 0",
        HONEST["unittest.main"][1].replace("main()", "main(argv=['x'], exit=False)"),
    ),
    "a result of unittest that nobody reads": ("def f(x): return 0", UNITTEST.replace("assert ", "")),
    "a test that is skipped": ("import unittest\ndef f(x): raise unittest.SkipTest", UNITTEST),
    "a subtest that has failed elsewhere": (
        "import unittest.case\nclass Stop(unittest.case._ShouldStop): pass\ndef f(x): raise Stop",
        UNITTEST,
    ),
}


@needs_isolation
@pytest.mark.parametrize("forgery", FORGED_FOR)
def test_verdicts_forged_for_a_kind_of_tests_score_nothing(forgery: str) -> None:
    program, tests = FORGED_FOR[forgery]
    assert score("code", [program], {"tests": tests}, args={"time_s": 10.0}, timeout_s=60.0) == [0.0]


def test_many_numbers_are_one_part_of_a_message() -> None:
    message, _ = plain.pack([[0.5] * 1000], lambda value: [])
    assert [len(node) for node in message["nodes"]] == [2]


@needs_isolation
@pytest.mark.parametrize("tests", ["def check(f): assert f(2) == 4", "x = 4", "def test_f(x): assert f(x) == 4"])
def test_tests_that_assert_nothing_are_refused(tests: str) -> None:
    with pytest.raises(ConfigError, match="asserts nothing"):
        score("code", ["def f(x): return 0"], {"tests": tests})
