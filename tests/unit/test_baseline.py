"""The baseline of the experiment: torch's own optimizers in place of the update."""

import torch

from ringmaster_dist.algorithm.layout import GEOMETRY_MAPS, Layout, Parameter
from ringmaster_dist.experiment.baseline import MuonAdamW
from ringmaster_dist.experiment.plan import BASELINE, radii

PARAMETERS = [
    Parameter("wte", (11, 4), "embedding"),
    Parameter("q", (4, 4)),
    Parameter("fc", (16, 4)),
    Parameter("head", (11, 4), "output"),
    Parameter("lambdas", (6,), "scalar"),
]
RATES = {"matrix": 0.02, "embedding": 0.2, "output": 0.01, "scalar": 0.04}


def test_the_baseline_is_torch_s_own_optimizers_with_a_rate_for_every_role():
    layout = Layout(PARAMETERS, GEOMETRY_MAPS["scion"])
    update = MuonAdamW(layout, RATES)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(layout.size, generator=generator)
    plain = {name: torch.nn.Parameter(view.clone()) for name, view in layout.views(x).items()}
    optimizers = {
        p.name: torch.optim.Muon([plain[p.name]], lr=1.0, momentum=0.95, weight_decay=0.0)
        if p.role == "matrix"
        else torch.optim.AdamW([plain[p.name]], betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
        for p in PARAMETERS
    }
    for eta in (1.0, 0.5, 0.25):  # a schedule multiplies every rate
        g = torch.randn(layout.size, generator=generator)
        before, out = x.clone(), torch.empty_like(x)
        update.apply(x, torch.zeros_like(x), g, eta=eta, alpha=0.05, out=out)
        assert torch.equal(x, before)
        x = out
        for parameter in PARAMETERS:
            plain[parameter.name].grad = layout.views(g)[parameter.name].clone()
            optimizer = optimizers[parameter.name]
            optimizer.param_groups[0]["lr"] = eta * RATES[parameter.role]
            optimizer.step()
    for name, view in layout.views(x).items():
        torch.testing.assert_close(view, plain[name].detach(), rtol=1e-5, atol=1e-6)


def test_both_sides_are_tuned_alike():
    """Both have the same number of choices, three of them for the step of matrices. Every rate reaches the baseline."""
    plan = radii("full", seeds=3)
    jobs = [job for job in plan.tuning() if job.regime == "delayed"]
    count = {name: sum(job.method == name for job in jobs) for name in plan.grids}
    assert count["radii"] == count[BASELINE]
    rates = [job.rates for job in jobs if job.method == BASELINE]
    assert {tuple(sorted(one)) for one in rates} == {("embedding", "matrix", "output", "scalar")}
    assert not any(word.startswith("rate.") for job in jobs for word in job.all_overrides)
