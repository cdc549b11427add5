"""Run the partial allreduce rules (``solo`` to ``full``): where gradients are summed depends on where the ranks are.

Who calls whom::

    ranks/worker_side.py  RankSession                  ranks/plane.py
          |                                                  ^
          v                                                  | extends
    round_member.py  RoundMember                       multi_host_plane.py  MultiHostPlane
      hands in gradients, applies the                    only if ranks are on several hosts: it has the sequencer
      results of rounds in their order
          |                   |
          v                   v
    one_host/           multi_host_member.py, then multi_host/
      shared memory       TCP between hosts
    model_means.py: rounds of parameters (``model_sync_every``), which wait for every rank

An example: a step of rank 1 under ``solo``. `RoundMember` writes the gradient into the send buffer and calls ``arrive``. If the open round
has no initiator yet, rank 1 closes it. It waits for the results that the answer names, and its optimizer makes one step with each of
them, in the order of the rounds; so all replicas make the same steps, also those of ranks that came late.
"""
