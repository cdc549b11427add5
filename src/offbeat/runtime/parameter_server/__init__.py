"""Run the rules with servers: shards hold the parameters, workers push gradients (or parameters) to them and pull the result.

Who calls whom::

    the worker's process                        each server's process
    worker_side.py  WorkerSession               shard.py  LiveShard; per_shard.py in rules of shard scope
      step, push, pull                            fold, release; carries out orders, decides nothing
          |                                           ^ orders (commands.py), equal at every server
          v                                           |
    exchange.py  Exchange  --- push --->        dispatch.py  Dispatcher; per_shard_dispatch.py     (server 0 only)
      memory, buffers, state                      effects -> orders to shards, messages to workers
    per_shard_pulls.py, interrupts.py                 ^ effects
                                                plane.py  ServerPlane                    (server 0 only)
                                                  what has arrived at every shard -> events for `core.job.Coordinator`

``encoding.py`` is both ends of a connection between hosts, if the worker has chosen a wire format.

An example: one gradient of worker 1 under ``bsp``, two workers, two servers.

1. ``optimizer.step()`` calls `WorkerSession.step`. The gradients lie in the worker's push memory already, as the model's ``.grad`` point
   there. `Exchange.push` sends ``push`` to server 1, and then to server 0 with what the push is of: version, samples, seconds, leases.
2. Server 1 answers with ``arrived`` to server 0. When both servers have the push, `ServerPlane` feeds the event `Pushed` to the
   coordinator, which answers nothing: ``bsp`` waits for worker 0.
3. Worker 0's push completes the round. The effects are one `Fold`, two `Settle` and two `Release`. `Dispatcher` turns the fold and the
   releases into orders, sends them to server 1, and lets server 0's own shard carry them out.
4. Each shard adds up weight * gradient from both workers' push memory, makes one optimizer step, and sends ``parameters`` to both workers.
   A worker goes on when the release of every server has come, all with the same serial number.
"""
