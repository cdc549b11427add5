"""Keep a worker's model in flat memory: parameters are read from the pull memory, gradients are written into the push memory.

Where model and memories are both on the CPU, or on one GPU, ``p.data`` *is* a view of the pull memory, so that pulling copies nothing. A
gradient is moved once: while the backward pass goes on if there is a MiB of them, at the step otherwise; from then on ``p.grad`` is a view
of the push memory. The ``Parameter`` objects stay the same, so optimizers, schedulers and the model's code are not affected. Parameters on
another device than the memories stay there, and `FlatModel.collect` and `FlatModel.pulled` copy (``staging.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from offbeat.core.gradient_contents import GradientContents
from offbeat.errors import ConfigurationError
from offbeat.gradient_watch import GradientWatch
from offbeat.tensors.absent import ABSENT, Words, candidates, distinguish, sign_at, words_of
from offbeat.tensors.layout import Layout, Memory, Span, elements, view
from offbeat.tensors.staging import Staging, each_finite
from offbeat.tensors.threads import single_threaded

DIGEST_NBYTES = 1 << 18
"""Bytes of a gradient that are read for its checksum."""
PIECE_NBYTES = 1 << 12
SAMPLE = 1 << 10
"""About how many 32-bit words of the parameters are compared to notice writes; each tensor has one at least."""
_WORD = 4
"""Bytes of a word."""
GATHERED_NBYTES = 1 << 20
"""Gradients of so many bytes together are moved and looked at in one go: one by one, each of a model's small tensors takes 25 us, in which
autograd computes a dozen. They are in the processor's cache still.
"""
CLOSE = (1e-5, 1e-7)
"""The relative and the absolute difference up to which a value counts as put back."""


@dataclass(slots=True)
class _Push:
    """A memory for gradients, and what is known of its contents."""

    memory: Memory
    grads: list[torch.Tensor]
    flat: torch.Tensor
    """The whole memory, as bytes."""
    words: Words
    """The same, as `candidates` reads it."""
    firsts: list[torch.Tensor]
    """The first element of each gradient, in the order of memory."""
    absent: set[int] = field(default_factory=set)
    """Tensors whose memory is marked: they have no gradient. See `absent`."""
    finite: dict[int, int] = field(default_factory=dict)
    """Tensors whose gradient was found finite, with the version counter then, which changes with each write in place."""

    def note(self, i: int, *, finite: bool) -> None:
        """Note whether a gradient, by the index of its tensor in the layout, is finite as it is now."""
        if finite:
            self.finite[i] = self.grads[i]._version
        else:
            self.finite.pop(i, None)


class FlatModel:
    """Connect a model to its two flat memories.

    Args:
        layout: of this model, see `Layout.of`.
        model: its trainable parameters are moved by `attach`.
        push: ``layout.nbytes`` writable bytes for gradients.
        pull: as many bytes for parameters.

    Raises:
        ConfigurationError: a memory has another size.
    """

    def __init__(self, layout: Layout, model: nn.Module, push: Memory, pull: Memory) -> None:
        self._layout = layout
        parameters = dict(model.named_parameters())
        self.parameters: list[nn.Parameter] = [parameters[spec.name] for spec in layout.tensors]
        """The model's trainable parameters, in the layout's order."""
        self._spans = [Span(spec.offset, spec.stop) for spec in layout.tensors]
        """Of each tensor, padding included."""
        order = layout.in_memory_order
        self._ranks = {i: rank for rank, i in enumerate(order)}
        """Of each tensor: how many are before it in memory."""
        tensors = (layout.tensors[i] for i in order)
        self._signs = np.array([sign_at(spec.offset, spec.itemsize) if spec.numel else 0 for spec in tensors])
        """Of the first element of each tensor, in the order of memory: see `sign_at`."""
        self._pushes: dict[int, _Push] = {}
        """By address: all memories for gradients used so far."""
        self._to = self._place(push)
        self._pull_memory = pull
        self._pull = elements(pull, 0, layout.nbytes, torch.uint8)
        self._datas = self._views(pull)
        self._addresses = [data.data_ptr() for data in self._datas]
        self._places = _sample_places(layout)
        self._remembered: np.ndarray | None = None
        self._whole: list[torch.Tensor] = []
        """Copies of all parameters at `remember`; empty: only the sample is compared."""
        self._versions: list[int] = []
        self._touched: str | None = None
        self.opening = True
        """True until the first backward pass."""
        self.loaded: str | None = None
        """The parameter that the script had written to when its first backward pass ended; None: no parameter."""
        self._hooks: list[RemovableHandle] = []
        self._gathered: list[int] = []
        """Tensors whose gradient a backward pass has computed since `_move`."""
        self._gathered_nbytes = 0
        self.computed: Callable[[int], None] = lambda _: None
        """Called when a backward pass has written a gradient into the push memory, with the tensor's index in the layout."""
        self.accumulating = False
        """True if there was a backward pass since the last step."""
        self.watch = GradientWatch(GradientContents())
        """Notes the backward passes over the batches of the script."""
        self._staging = Staging()

    def remember(self, *, values: bool = True, whole: bool = False) -> None:
        """Remember what `touched` and `changed` compare: autograd's counts, and unless ``values`` is False a sample of the parameters, or
        all of them (``whole``)."""
        self._remembered = self._words() if values else None
        self._whole = [value.clone() for value in self._values()] if values and whole else []
        self._versions = [parameter._version for parameter in self.parameters]
        self._touched = None

    def _values(self) -> Iterable[torch.Tensor]:
        for parameter, data in zip(self.parameters, self._datas, strict=True):
            yield data if parameter.device == data.device else parameter.detach()

    def adopt(self) -> None:
        """Copy parameters whose ``p.data`` the script has replaced into the pull memory, and make ``p.data`` a view of it again.

        So ``p.data = value`` does the same as ``p.data.copy_(value)``.

        Raises:
            ConfigurationError: the new tensor has another dtype or shape.
        """
        for i in self._replaced():
            parameter, data, name = self.parameters[i], self._datas[i], self._layout.tensors[i].name
            if parameter.dtype is not data.dtype or parameter.shape != data.shape:
                raise ConfigurationError(
                    f"{name} is {parameter.dtype} of shape {tuple(parameter.shape)}, and was {data.dtype} of shape {tuple(data.shape)} "
                    "when its optimizer was wrapped: convert the model (model.double(), .half(), .to(dtype)) before that"
                )
            with torch.no_grad():
                data.copy_(parameter)
                parameter.data = data
            self._touched = self._touched or name

    def _replaced(self) -> Iterator[int]:
        """Yield the indices of parameters whose ``p.data`` is not in the pull memory, and should be."""
        # Read in each call, of each tensor: the device, which takes longest to ask for, only where the address differs.
        for i, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
            if parameter.data_ptr() != address and self._datas and parameter.device == self._datas[i].device:
                yield i

    def touched(self) -> str | None:
        """Return the name of a parameter that has been written to in place, or whose ``p.data`` was replaced, since `remember`; None: none
        is known. Its value may have been put back since."""
        if self._touched is None and self._versions:
            versions = enumerate(zip(self.parameters, self._versions, strict=True))
            written = next((i for i, (parameter, version) in versions if parameter._version != version), None)
            written = next(self._replaced(), None) if written is None else written
            self._touched = None if written is None else self._layout.tensors[written].name
        return self._touched

    def changed(self, *, exact: bool) -> str | None:
        """Return the name of a parameter whose value is not the one at `remember`, other than by pulling; None: none is known.

        Args:
            exact: False: differences of float32 values that adding and subtracting may leave do not count.
        """
        if self._whole:
            for spec, before, value in zip(self._layout.tensors, self._whole, self._values(), strict=True):
                about = value.dtype is torch.float32 and not exact
                if not (torch.allclose(value, before, *CLOSE) if about else torch.equal(value, before)):
                    return spec.name
        elif self._remembered is not None and self._datas:
            words = self._words()
            for differs in np.flatnonzero(words != self._remembered):
                at = int(self._places[differs]) * _WORD
                spec = next(spec for spec in self._layout.tensors if spec.offset <= at < spec.stop)
                pair = np.array([words[differs], self._remembered[differs]]).view(np.float32)
                if exact or spec.dtype != "float32" or not np.isclose(pair[0], pair[1], rtol=CLOSE[0], atol=CLOSE[1]):
                    return spec.name
        return None

    def _words(self) -> np.ndarray:
        if self._pull.is_cpu:
            words: np.ndarray = self._pull.numpy().view(np.uint32)[self._places]
        else:
            words = self._pull.view(torch.int32)[torch.from_numpy(self._places)].cpu().numpy().view(np.uint32)
        return words

    def attach(self) -> None:
        """Copy the parameters into the pull memory and make each ``p.data`` a view of it; gradients go to the push memory."""
        assert not self._hooks, "attach() was called twice"
        with torch.no_grad():
            self._copy(self._pull_memory, self._datas, self.parameters)
            for i, (parameter, data) in enumerate(zip(self.parameters, self._datas, strict=True)):
                if parameter.device == data.device:
                    parameter.data = data
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._accumulated, i, data.nbytes)))

    def collect(self) -> str | None:
        """Bring the gradients into the push memory, whatever was done to ``p.grad``: clipped in place, replaced, deleted.

        A tensor without a gradient is marked as one: see `absent`.

        Returns:
            The name of the first tensor whose gradient is not finite; None if all are.

        Raises:
            ConfigurationError: a gradient is sparse.
        """
        self._move()
        put, elsewhere = [], []
        with torch.no_grad():
            for i, (parameter, place) in enumerate(zip(self.parameters, self._to.grads, strict=True)):
                if (grad := parameter.grad) is place:
                    continue
                if grad is None:
                    if i not in self._to.absent:
                        place.fill_(ABSENT)
                        self._to.absent.add(i)
                    continue
                put.append(i)
                if grad.is_cpu is not place.is_cpu:
                    elsewhere.append(i)
            self._keep(put, stay=True)
            if elsewhere:
                self._staging.wait()
                self._check_there(elsewhere)
        finite, absent = self._to.finite, self._to.absent
        changed = [i for i, grad in enumerate(self._to.grads) if finite.get(i) != grad._version and i not in absent]
        wrong = self._check(changed)
        return None if wrong is None else self._layout.tensors[wrong].name

    def filled(self, i: int, *, finite: bool) -> None:
        """Note that a gradient is in the push memory which another process has written, or this one without a backward pass of the model.

        Args:
            i: the tensor's index in the layout.
            finite: whether it was found finite.
        """
        place = self._to.grads[i]
        self.parameters[i].grad = place
        self.accumulating = True
        self._to.absent.discard(i)
        self._to.note(i, finite=finite)
        self.computed(i)

    def digest(self) -> int | None:
        """Return a checksum of the gradient that `collect` has brought together; None if that is all zeros, which is no evidence.

        Of a large gradient it reads `DIGEST_NBYTES`, in pieces spread over all of it.
        """
        flat = self._to.flat
        pieces = DIGEST_NBYTES // PIECE_NBYTES
        if flat.nbytes > DIGEST_NBYTES:
            starts = [number * (flat.nbytes - PIECE_NBYTES) // (pieces - 1) for number in range(pieces)]
            parts = [flat[start : start + PIECE_NBYTES] for start in starts]
        else:
            parts = [flat]
        read = [part.numpy() for part in (parts if flat.is_cpu else [torch.cat(parts).cpu()])]
        if not any((piece & 0x7F).any() for piece in read):  # the sign of a negative zero is the upper bit of a byte
            return None
        digest = 0
        for piece in read:
            digest = zlib.crc32(piece.data, digest)
        return digest

    def stepped(self) -> None:
        """Note that a step has used the gradient."""
        self.accumulating = False

    def pulled(self) -> None:
        """Use the parameters that are now in the pull memory. On the CPU they are in place, unless ``p.data`` was replaced."""
        elsewhere = []
        with torch.no_grad():
            for i, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
                if parameter.data_ptr() == address:
                    continue
                if parameter.device == self._datas[i].device:
                    parameter.data = self._datas[i]
                else:
                    elsewhere.append(i)
            self._copy(self._pull_memory, [self.parameters[i] for i in elsewhere], [self._datas[i] for i in elsewhere])

    def renewed(self) -> None:
        """Tell autograd that parameters with a gradient have new values, which other processes have written, as a step in place would.

        A backward pass through a graph from before then raises, as in plain PyTorch; else it would compute with the new values.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                increment_version(parameter)

    def store(self) -> None:
        """Copy the parameters into the pull memory if they are elsewhere, or ``p.data`` was replaced."""
        with torch.no_grad():
            elsewhere = [i for i, address in enumerate(self._addresses) if self.parameters[i].data_ptr() != address]
            self._copy(self._pull_memory, [self._datas[i] for i in elsewhere], [self.parameters[i] for i in elsewhere])

    def offer(self) -> None:
        """Write the parameters into the push memory, as the job's initial ones. Gradients that were there get memory of their own."""
        self._move()
        with torch.no_grad():
            for parameter, grad in zip(self.parameters, self._to.grads, strict=True):
                if parameter.grad is not None and parameter.grad.data_ptr() == grad.data_ptr():
                    parameter.grad = grad.clone()
                    self.watch.moved(parameter)
            self._copy(self._to.memory, self._to.grads, self.parameters)
        self._to.absent.clear()

    def redirect(self, push: Memory) -> None:
        """Write gradients to another push memory from now on. A ``grad`` in the old memory becomes None."""
        self._move()
        with torch.no_grad():
            for parameter, grad in zip(self.parameters, self._to.grads, strict=True):
                if parameter.grad is not None and parameter.grad.data_ptr() == grad.data_ptr():
                    parameter.grad = None
        address = elements(push, 0, self._layout.nbytes, torch.uint8).data_ptr()
        self._to = self._pushes.get(address) or self._place(push)

    def repoint(self, pull: Memory) -> None:
        """Use the parameters in another pull memory from now on; several workers may share it."""
        if not (isinstance(pull, memoryview) and isinstance(self._pull_memory, memoryview) and pull.obj is self._pull_memory.obj):
            self._staging.unlock(self._pull_memory)  # it is in another mapping
        self._pull_memory = pull
        self._pull = elements(pull, 0, self._layout.nbytes, torch.uint8)
        self._datas = self._views(pull)
        self._addresses = [data.data_ptr() for data in self._datas]
        self.pulled()

    def detach(self) -> None:
        """Give parameters and gradients memory of their own again, and forget the flat memories."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._move()
        with torch.no_grad():
            for parameter, data, grad in zip(self.parameters, self._datas, self._to.grads, strict=False):
                if parameter.data_ptr() == data.data_ptr():
                    parameter.data = data.clone()
                if parameter.grad is not None and parameter.grad.data_ptr() == grad.data_ptr():
                    parameter.grad = grad.clone()
        self._staging.unlock()
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._to, self._datas, self._pull, self._pull_memory = _Push(nothing, [], nothing, words_of(nothing), []), [], nothing, nothing
        self._pushes.clear()

    def _place(self, push: Memory) -> _Push:
        """Return the views of a push memory in which no tensor has a gradient."""
        grads = [view.data for view in self._views(push)]  # no views, whose detach_() fails: zero_grad() of many scripts calls it
        flat = elements(push, 0, self._layout.nbytes, torch.uint8)
        flat.zero_()
        for grad in grads:
            grad.fill_(ABSENT)
        tensors = self._layout.tensors
        firsts = [elements(push, tensors[i].offset, min(1, tensors[i].numel), grads[i].dtype) for i in self._layout.in_memory_order]
        place = _Push(push, grads, flat, words_of(flat), firsts, set(range(len(self.parameters))))
        self._pushes[flat.data_ptr()] = place
        return place

    def _views(self, memory: Memory) -> list[torch.Tensor]:
        if memory.nbytes != self._layout.nbytes:
            raise ConfigurationError(
                f"a model of {self._layout.nbytes} bytes was given {memory.nbytes} bytes of memory; they must be equal"
            )
        return [view(memory, spec) for spec in self._layout.tensors]

    def _accumulated(self, i: int, nbytes: int, parameter: torch.Tensor) -> None:
        """Called after a backward pass has added to this gradient, of so many bytes."""
        self.accumulating = True
        if self.opening:
            self.opening, self.loaded = False, self.touched() or self.changed(exact=False)
        self.watch.accumulated(parameter)
        self._gathered.append(i)
        self._gathered_nbytes += nbytes
        if self._gathered_nbytes >= GATHERED_NBYTES:
            self._move()

    def _move(self) -> None:
        """Move the gradients that backward passes have computed into the push memory, where later passes add to them."""
        if not self._gathered:
            return
        gathered = sorted(set(self._gathered))
        self._gathered.clear()
        self._gathered_nbytes = 0
        with torch.no_grad():
            # With create_graph the gradient is part of a graph that the user still needs; `collect` copies it.
            moved = self._keep(gathered, stay=False)
            if self._to.flat.is_cpu:  # a look at what a GPU has would wait for all that it was asked to compute
                self._check(moved)
            for i in moved:
                self.computed(i)

    def _keep(self, which: Iterable[int], *, stay: bool) -> list[int]:
        """Copy gradients into the push memory, and let them be there from now on.

        Args:
            which: of these tensors, where they have a gradient.
            stay: True: also copy those that stay where they are, on a device or in a graph.

        Returns:
            Those that are in the push memory now.
        """
        kept, to, source = [], [], []
        parameters, places, absent, is_cpu = self.parameters, self._to.grads, self._to.absent, self._to.flat.is_cpu
        for i in which:
            if (grad := parameters[i].grad) is None:
                continue
            stays = grad is not places[i] and (grad.is_cpu is not is_cpu or grad.requires_grad)
            if stays and not stay:
                continue
            absent.discard(i)
            if grad is not places[i]:
                if grad.layout is not torch.strided:
                    raise ConfigurationError(
                        f"the gradient of {self._layout.tensors[i].name} is sparse; gradients are exchanged dense: use sparse=False"
                    )
                to.append(places[i])
                source.append(grad)
            if not stays:
                kept.append(i)
        self._copy(self._to.memory, to, source, waits=False)
        for i in kept:
            if parameters[i].grad is not places[i]:
                parameters[i].grad = places[i]
                self.watch.moved(parameters[i])
        return kept

    def _copy(self, memory: Memory, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], *, waits: bool = True) -> None:
        """Copy tensors; of two, one is in this flat memory.

        Args:
            waits: False: copies to and from other devices may be under way when this returns.
        """
        near = [i for i, (one, other) in enumerate(zip(to, source, strict=True)) if one.is_cpu is other.is_cpu]
        if near:
            torch._foreach_copy_([to[i] for i in near], [source[i] for i in near])
        if len(near) < len(to):
            self._staging.lock(memory)
            for one, other in zip(to, source, strict=True):
                if one.is_cpu is not other.is_cpu:
                    self._staging.copy(one, other)
        if waits:
            self._staging.wait()

    def _check_there(self, elsewhere: list[int]) -> None:
        """Note which gradients are finite, of those that other devices have: they look at them faster than this process at its copies."""
        grads = [grad for i in elsewhere if (grad := self.parameters[i].grad) is not None]
        for i, finite in zip(elsewhere, each_finite(grads), strict=True):
            self._to.note(i, finite=finite)
        for run in self._runs(elsewhere):
            self._distinguish(run)

    def _check(self, which: Sequence[int]) -> int | None:
        """Return the first of these tensors whose gradient is not finite; None: all are finite.

        A look at gradients is cheap while they are in the cache: so they are checked right after the backward pass, and `collect` checks
        only those that have changed since. Neighbours in memory are looked at together.
        """
        wrong = None
        for run in self._runs(which):
            together = self._to.flat[self._spans[run[0]].start : self._spans[run[-1]].stop].view(self._to.grads[run[0]].dtype)
            finite = all_finite(together)
            self._distinguish(run)
            for i in run:
                if finite or all_finite(self._to.grads[i]):
                    self._to.finite[i] = self._to.grads[i]._version
                else:
                    self._to.finite.pop(i, None)
                    wrong = i if wrong is None else min(i, wrong)
        return wrong

    def _distinguish(self, run: list[int]) -> None:
        """Let none of these neighbours in memory, each of which has a gradient, be taken for a tensor without one."""
        start, stop = self._ranks[run[0]], self._ranks[run[-1]] + 1
        firsts = self._to.firsts[start:stop]
        if self._to.flat.is_cpu:  # what a GPU has is not looked at
            firsts = [firsts[i] for i in candidates(self._to.words, self._signs[start:stop])]
        distinguish([first for first in firsts if first.numel()])

    def _runs(self, which: Sequence[int]) -> list[list[int]]:
        """Return these tensors in runs of neighbours of one dtype."""
        runs: list[list[int]] = []
        stop, dtype = -1, None
        for i in sorted(which, key=self._spans.__getitem__):
            span, grad = self._spans[i], self._to.grads[i]
            if span.start == stop and grad.dtype is dtype:
                runs[-1].append(i)
            else:
                runs.append([i])
            stop, dtype = span.stop, grad.dtype
        return runs


def _sample_places(layout: Layout) -> np.ndarray:
    """Return which 32-bit words of a layout are compared to notice writes, spread over each tensor."""
    most = max(1, SAMPLE // len(layout.tensors))
    places = []
    for spec in layout.tensors:
        words = -(-spec.nbytes // _WORD)
        places.append(spec.offset // _WORD + np.unique(np.linspace(0, max(0, words - 1), min(most, words), dtype=np.int64)))
    return np.concatenate(places)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is infinite or NaN; both survive a sum."""
    with single_threaded():
        wide = torch.float32 if tensor.itemsize < 4 else tensor.dtype
        return bool(torch.isfinite(tensor.sum(dtype=wide))) or bool(torch.isfinite(tensor).all())
