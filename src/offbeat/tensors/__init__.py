"""Work on parameters and gradients in flat memory: lay out a model, sum weighted gradients, step an optimizer. No network, no rule.

```
    worker process                                    server process
    flat.FlatModel                                    shard.Shard | averaging.AveragingShard
      p.grad ── push memory ──► (transport) ──►         fold: g = sum(weight * gradient), optimizer step
      p.data ◄─ pull memory ◄── (transport) ◄──         parameters of one span
          │                                               │
          └─────────────► layout.Layout ◄─────────────────┘
                 tensor -> byte offset, the same in every process of a job
```

`Layout.spans` cuts the memory into one contiguous range of bytes, a `Span`, for each server. ``blocks.py`` cuts a span into pieces that fit
the cache, ``optimizers.py`` and ``state.py`` carry the optimizer and its state as plain data, ``absent.py`` marks tensors without a
gradient, ``wire_formats.py`` encodes a span for a connection between hosts, ``running_sum.py`` is a rank's part in an allreduce,
``natural_gradient.py`` and ``fisher.py`` are an optimizer of the worker's side. Memory may be a GPU's (``gpu.py``): then it is a memoryview
that the host cannot read, and `layout.elements` and `layout.copy` are the only ways to its bytes.

Example: one server folds two gradients with weight 1/2 each and steps SGD with learning rate 1: parameters = 0 - (2 + 4) / 2.

>>> import torch
>>> from offbeat.tensors.layout import Layout
>>> from offbeat.tensors.optimizers import spec_of
>>> from offbeat.tensors.shard import Shard
>>> model = torch.nn.Linear(2, 1, bias=False)
>>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
>>> layout = Layout.of(model, sgd)
>>> parameters = torch.zeros(layout.nbytes, dtype=torch.uint8)
>>> shard = Shard(layout, layout.spans(1, splittable=True)[0], spec_of(sgd), parameters)
>>> first, second = (torch.full((layout.nbytes // 4,), value).view(torch.uint8) for value in (2.0, 4.0))
>>> shard.fold([(first, 0.5), (second, 0.5)])
>>> parameters.view(torch.float32)[:2]
tensor([-3., -3.])
"""
