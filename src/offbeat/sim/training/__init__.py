"""Give the contributions of a simulated job their contents: none, norms drawn from a model of noise, or gradients of a real model.

```
    sim.simulation
        │ released, handed_in, fold, settled ...
        ▼
    workload.Workload            no contents: only times are simulated
        ├── noise.NoisyWorkload  norms of gradients, for rules that look at them
        └── gradients.Training   a torch model, its data and its optimizer; one engine for each kind of rule:
               ├── job_gradients.JobGradients        gradients, job scope
               ├── local_steps.LocalSteps            averaged parameters
               ├── shard_gradients.ShardGradients    gradients, shard scope
               ├── replicas                          allreduce family
               └── gossip_replicas.GossipReplicas    gossip family
    model, batches               the model that computes for all workers in turn; which samples it sees
```

A gradient is computed when it is folded, from the parameters that its worker had when it began; a dropped one costs nothing.

Example: four workers fit y = 3x + 1 under a staleness bound of 3.

>>> import torch
>>> from offbeat.sim.cluster import Cluster, Work
>>> from offbeat.sim.run import simulate
>>> from offbeat.sim.training.gradients import Training
>>> model = torch.nn.Linear(1, 1)
>>> x = torch.linspace(-1.0, 1.0, 64).unsqueeze(1)
>>> training = Training(model, torch.nn.functional.mse_loss, (x, 3 * x + 1), torch.optim.SGD(model.parameters(), lr=0.05))
>>> _ = simulate("ssp(staleness=3)", Cluster(workers=4), Work(versions=200, batch=16), content=training)
>>> round(model.weight.item(), 2), round(model.bias.item(), 2)
(3.0, 1.0)
"""
