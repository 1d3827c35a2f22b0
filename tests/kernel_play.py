"""A Gluon kernel's own text run on the host: roles are threads, barriers and copies are played, numbers are not.

Of the kernel everything is taken that decides who waits for whom: which barriers it makes and with how many arrivals,
which bytes it announces, which stage each role reads or fills, what it gives back and when. What is computed is a
`Value`, of which nothing is known. Copies land when the drawn order lets them, and another role goes on wherever one
could: so a wait that is missing shows as an overwritten buffer, and a wait too many as roles that wait for each other.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import threading
import types
from math import prod

WARPGROUP_THREADS = 128


class Value:
    """Anything that is computed."""

    def __getattr__(self, name):
        return VALUE

    def __call__(self, *args, **kwargs):
        return VALUE

    def __getitem__(self, key):
        return VALUE

    def __bool__(self):
        return True

    __hash__ = object.__hash__


def _any(*_):
    return VALUE


VALUE = Value()
for _name in "add sub mul truediv floordiv mod and or xor pow lshift rshift".split():
    setattr(Value, f"__{_name}__", _any)
    setattr(Value, f"__r{_name}__", _any)
for _name in "eq ne lt le gt ge neg invert".split():
    setattr(Value, f"__{_name}__", _any)


class Number(int):
    """An integer that a kernel computes with, which has `to` as its scalars have."""

    def to(self, dtype):
        return self


def _closed(name):
    plain = getattr(int, name)

    def compute(self, other):
        found = plain(self, other) if isinstance(other, int) else NotImplemented
        return Number(found) if type(found) is int else found

    return compute


for _name in "add sub mul floordiv mod and or xor".split():
    for _side in ("", "r"):
        setattr(Number, f"__{_side}{_name}__", _closed(f"__{_side}{_name}__"))


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have landed."""

    def init(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.bytes = self.phase = 0

    def arrive(self, announced=0):
        self.missing -= 1
        assert self.missing >= 0, "one arrival too many"
        self.land(-announced)

    def land(self, count):
        self.bytes -= count
        if self.missing == self.bytes == 0:
            self.phase ^= 1
            self.missing = self.arrivals

    def passed(self, parity):
        return self.phase != parity


class NamedBarrier:
    """A barrier of the hardware: its generation moves on when as many threads came as it was called for."""

    def __init__(self):
        self.came = self.generation = 0

    def arrive(self, threads):
        """The generation that ends this arrival's wait."""
        wanted = self.generation + 1
        self.came += WARPGROUP_THREADS
        assert self.came <= threads, "more threads came than a named barrier was called for"
        if self.came == threads:
            self.came, self.generation = 0, wanted
        return wanted


class Buffer:
    """A buffer in shared memory: what it holds, who reads it, and whether a copy into it is under way."""

    dtype = VALUE

    def __init__(self, play):
        self.play, self.held, self.readers, self.flying = play, None, 0, False
        self.unfenced = None  # the role whose stores other parts of the processor need not see yet
        play.buffers.append(self)

    def reshape(self, shape):
        return self

    permute = reshape

    def begin(self):
        assert not self.flying and self.held is not None, "a buffer is read before its copy has landed"
        self.readers += 1

    def load(self, layout=None):
        self.begin()
        self.play.pause()
        self.readers -= 1
        return VALUE

    def store(self, value):
        assert not self.readers and not self.flying, "a buffer is overwritten while it is read"
        self.unfenced = threading.current_thread()
        self.held = self.held or "results"


class Array:
    """Buffers or barriers side by side."""

    dtype = VALUE

    def __init__(self, parts):
        self.parts = parts

    def index(self, number):
        return self.parts[number]


class Role(threading.Thread):
    """A partition of the kernel. It runs only while the play waits for it."""

    def __init__(self, play, number, function, args):
        super().__init__(daemon=True)
        self.play, self.number, self.function, self.args = play, number, function, args
        self.turn, self.wait, self.done = threading.Semaphore(0), None, False
        self.products, self.stores = [], []

    def run(self):
        self.turn.acquire()
        try:
            if not self.play.stopped:
                self.function(*self.args)
                assert not self.products and not self.stores, "a role ends before what it issued is done"
        except BaseException as error:
            self.play.error = self.play.error or error
        self.done = True
        self.play.back.release()


class Stopped(BaseException):
    """Ends the roles of a play that failed."""


class Language:
    """`gl`, the memory, barriers, copies and products of Gluon, for one program of a kernel."""

    def __init__(self, play, program, programs):
        self.play, self.program, self.programs = play, program, programs
        self.static_range, self.int64, self.constexpr = range, "int64", object

    def __getattr__(self, name):
        return VALUE

    def program_id(self, axis):
        return Number(self.program)

    def num_programs(self, axis):
        return Number(self.programs)

    def cdiv(self, a, b):
        return Number(-(-a // b))

    def minimum(self, a, b):
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else VALUE

    def maximum(self, a, b):
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else VALUE

    def split(self, value):
        return VALUE, VALUE

    def allocate_shared_memory(self, dtype, shape, layout):
        return Array([Barrier() if dtype is self.int64 else Buffer(self.play) for _ in range(shape[0])])

    def warp_specialize(self, partitions, warps, registers):
        assert len(partitions) == len(warps) + 1 == len(registers) + 1
        self.play.roles = [Role(self.play, n, *partition) for n, partition in enumerate(partitions)]

    def inline_asm_elementwise(self, text, constraints, args, *rest, **more):
        named = re.match(r"bar\.(sync|arrive) \$1, (\d+);", text)
        if named:
            barrier = self.play.named.setdefault(int(args[0]), NamedBarrier())
            wanted = barrier.arrive(int(named[2]))
            if named[1] == "sync":
                self.play.pause(lambda: barrier.generation >= wanted)
        return VALUE


class Play:
    """One program of a kernel. `reads` has what the products of each role read, in the order in which they were issued:
    (what the left operand's buffer holds or None, what the right operand's holds)."""

    def __init__(self, rng):
        self.rng, self.roles, self.landing, self.named = rng, [], [], {}
        self.back, self.stopped, self.error = threading.Semaphore(0), False, None
        self.reads, self.buffers = {}, []

    def pause(self, wait=None):
        """Let others act, until `wait` holds."""
        role = threading.current_thread()
        role.wait = wait
        self.back.release()
        role.turn.acquire()
        if self.stopped:
            raise Stopped

    def run(self):
        """Let the roles act and the copies land in an order drawn by `rng`."""
        for role in self.roles:
            role.start()
        try:
            while self.landing or not all(role.done for role in self.roles):
                ready = [role for role in self.roles if not role.done and (role.wait is None or role.wait())]
                assert ready or self.landing, "all wait for each other"
                choice = self.rng.randrange(len(ready) + len(self.landing))
                if choice >= len(ready):
                    self.landing.pop(choice - len(ready))()
                    continue
                ready[choice].turn.release()
                self.back.acquire()
                if self.error is not None:
                    raise self.error
        finally:
            self.stopped = True
            for role in self.roles:
                role.turn.release()

    def modules(self):
        """What a kernel calls of Gluon beside `gl`."""
        role = threading.current_thread
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=_any,
            init=lambda barrier, count: barrier.init(count),
            arrive=lambda barrier, count: [barrier.arrive() for _ in range(count)],
            expect=lambda barrier, count: barrier.arrive(count),
            wait=lambda barrier, parity: self.pause(lambda: barrier.passed(parity)),
        )
        return {
            "mbarrier": mbarrier,
            "tma": types.SimpleNamespace(store_wait=self.store_wait),
            "copy_in": self.copy_in,
            "copy_out": self.copy_out,
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": lambda left, deps: self.finish(role(), left),
        }

    def copy_in(self, desc, coordinates, barrier, buffer):
        assert not buffer.readers, "a buffer is overwritten while it is read"
        assert not buffer.flying, "a buffer is overwritten by two copies"
        buffer.held, buffer.flying = None, True

        def land():
            buffer.held, buffer.flying = (desc.name, *map(int, coordinates)), False
            barrier.land(desc.block_type.nbytes)

        self.landing.append(land)

    def copy_out(self, desc, coordinates, buffer):
        assert not buffer.unfenced, "a copy may not see what was stored before it: no fence"
        buffer.begin()
        threading.current_thread().stores.append(buffer)

    def store_wait(self, left):
        self.pause()
        stores = threading.current_thread().stores
        while len(stores) > left:
            stores.pop(0).readers -= 1

    def fence(self):
        for buffer in self.buffers:
            if buffer.unfenced is threading.current_thread():
                buffer.unfenced = None

    def multiply(self, left, right, acc, use_acc=True, is_async=False):
        read = [operand for operand in (left, right) if isinstance(operand, Buffer)]
        for buffer in read:
            assert not buffer.unfenced, "a product may not see what was stored before it: no fence"
            buffer.begin()
        role = threading.current_thread()
        role.products.append(read)
        held = left.held if isinstance(left, Buffer) else None
        self.reads.setdefault(role.number, []).append((held, right.held))
        return VALUE

    def finish(self, role, left):
        self.pause()
        while len(role.products) > left:
            for buffer in role.products.pop(0):
                buffer.readers -= 1
        return VALUE


class Descriptor:
    """A tensor descriptor as a kernel sees it."""

    def __init__(self, name, descriptor):
        self.name, self.shape, self.dtype, self.layout = name, list(map(Number, descriptor.shape)), VALUE, VALUE
        shape = list(descriptor.block_shape)
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=prod(shape) * descriptor.base.element_size())


def seen(arg, name):
    """An argument of a launch as the kernel sees it."""
    if hasattr(arg, "block_shape"):
        return Descriptor(name, arg)
    return Number(arg) if type(arg) is int else arg if hasattr(arg, "PRODUCER_REGISTERS") or arg is None else VALUE


def namespace(module, fakes, played, changes):
    """The names of a module, whose functions for the device are functions of the host that see `fakes`. `played` are
    those made so far, by the function they are made of; `changes` are (old text, new text) of functions."""
    names = dict(vars(module))
    for name, value in vars(module).items():
        function = getattr(value, "fn", None)
        if name in fakes:
            names[name] = fakes[name]
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
        elif isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            code = changed(function, changes)
            names[name] = played[function] = types.FunctionType(code, names, name, function.__defaults__)
        elif function in played:
            names[name] = played[function]
    return names


def changed(function, changes):
    """The code of a function, after changes to its text."""
    text = textwrap.dedent(inspect.getsource(function))
    found = [(old, new) for old, new in changes if old in text]
    if not found:
        return function.__code__
    for old, new in found:
        text = text.replace(old, new)
    code = compile("from __future__ import annotations\n" + text[text.index("def ") :], "<changed>", "exec")
    return next(c for c in code.co_consts if isinstance(c, types.CodeType))


def play_program(modules, launch, program, rng, changes=()):
    """Play one program of a launch, whose kernel is in the last of `modules`, which import from those before."""
    play = Play(rng)
    fakes, played = {"gl": Language(play, program, launch.grid[0]), **play.modules()}, {}
    for module in modules:
        names = namespace(module, fakes, played, changes)
    kernel = names[launch.kernel.fn.__name__]
    arguments = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    kernel(*(seen(arg, name) for arg, name in zip(launch.args, arguments, strict=True)))
    play.run()
    assert not any(buffer.readers for buffer in play.buffers)
    return play
