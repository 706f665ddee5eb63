"""The losses of AWM, RAM and SFT, their draws and the KL: golden values, closed forms, gradients."""

import json
import math

import pytest
import torch
from conftest import ROOT

import common

GOLDEN = ROOT.parent / "shared" / "golden" / "golden_sde.json"
SIGMAS = torch.tensor([1, 0.96, 0.9, 0.8, 0.6, 0.3, 0.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def golden() -> dict:
    if not GOLDEN.exists():
        pytest.skip("the golden file is not beside this checkout")
    return json.loads(GOLDEN.read_text())


def golden_draw() -> dict[str, torch.Tensor]:
    """The golden file's two samples at t = .8 and .3, all of a sample as the channels of one location: [2, 1, 1, 12]."""
    i = torch.arange(24, dtype=torch.float64)
    x0, eps, v = (a.view(2, 1, 1, 12) for a in (0.8 * (0.5 * i).cos(), (1.3 * i + 0.4).cos(), 0.9 * (0.7 * i).sin()))
    t = torch.tensor([0.8, 0.3], dtype=torch.float64).view(2, 1, 1)
    x = (1 - t[..., None]) * x0 + t[..., None] * eps
    return {"t": t, "x": x, "flow": eps - x0, "v": v}


def random_draws(n: int = 3, d: int = 2, tokens: int = 4, channels: int = 5, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """velocity, v_base, v_old, flow [N, D, L, C] in float64 and credit [N, 1, L] of both signs."""
    g = torch.Generator().manual_seed(seed)
    fields = torch.randn(4, n, d, tokens, channels, generator=g, dtype=torch.float64)
    return (*fields.unbind(0), torch.randn(n, 1, tokens, generator=g, dtype=torch.float64))


def error_of(velocity: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    return (velocity - flow).square().mean(-1)


# ---------------------------------------------------------------- AWM


AWM_KEYS = {"uniform": "Uniform", "t": "t", "t2": "t**2", "huber": "huber", "ghuber": "ghuber_p0.25"}


@pytest.mark.parametrize("weighting", AWM_KEYS)
def test_awm_log_prob_has_the_golden_values(golden, weighting):
    draw = golden_draw()
    error = error_of(0.5 * draw["x"] + 0.1 * draw["v"], draw["flow"])
    assert error.flatten().tolist() == pytest.approx(golden["awm"]["mse"], abs=1e-15)
    got = common.awm_log_prob(error, draw["t"], weighting)
    assert got.flatten().tolist() == pytest.approx(golden["awm"]["logp"][AWM_KEYS[weighting]], abs=4e-15)


def test_awm_log_prob_has_the_published_numbers():
    """formulas 13, in the test itself so that it runs without the golden file."""
    draw = golden_draw()
    error = error_of(0.5 * draw["x"] + 0.1 * draw["v"], draw["flow"])
    for weighting, want in {
        "uniform": [-0.5897528744, -0.9630515514], "t": [-0.4718022996, -0.2889154654], "t2": [-0.3774418396, -0.0866746396],
        "huber": [-0.6143549544, -0.2944025700], "ghuber": [-2.7941356600, -1.1849637519],
    }.items():  # fmt: skip
        got = common.awm_log_prob(error, draw["t"], weighting)
        assert got.flatten().tolist() == pytest.approx(want, abs=1e-10)
    with pytest.raises(ValueError, match="weighting"):
        common.awm_log_prob(error, draw["t"], "none")


def test_awm_on_policy_has_the_gradient_of_the_weighted_log_prob():
    """At ratio 1 the clip is silent: d loss = -mean(credit * d log_prob), location by location."""
    v, _, _, flow, credit = random_draws()
    v.requires_grad_()
    t = torch.rand(3, 2, 1, dtype=torch.float64)
    for weighting in AWM_KEYS:
        error = error_of(v, flow)
        loss, info = common.awm_loss(error, error.detach(), t, credit, weighting=weighting, clip_range=1.0)
        (got,) = torch.autograd.grad(loss, v)
        plain = -(credit * common.awm_log_prob(error_of(v, flow), t, weighting)).mean()
        (want,) = torch.autograd.grad(plain, v)
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-15) and got.abs().min() > 0
        assert not info["ratio_gap"].any()


def test_awm_off_policy_is_ppo_on_its_log_prob():
    old_error = torch.tensor([[[1.0]], [[1.0]]], dtype=torch.float64)
    error = torch.tensor([[[0.5]], [[0.5]]], dtype=torch.float64)  # log-ratio +.5 with uniform weights
    credit = torch.tensor([1.0, -1.0], dtype=torch.float64).view(2, 1, 1)
    t = torch.ones(2, 1, 1, dtype=torch.float64)
    loss, _ = common.awm_loss(error, old_error, t, credit, weighting="uniform", clip_range=0.2)
    assert loss.item() == pytest.approx((-1.2 + math.exp(0.5)) / 2, abs=1e-14)


# ---------------------------------------------------------------- RAM


def test_ram_has_the_golden_values(golden):
    draw = golden_draw()
    v = 0.5 * draw["x"] + 0.1 * draw["v"]
    v_base, v_old = 0.45 * draw["x"] + 0.05 * draw["v"], 0.48 * draw["x"] + 0.08 * draw["v"]
    advantage = torch.tensor(golden["ram"]["adv"], dtype=torch.float64).view(2, 1, 1)
    loss = common.ram_loss(v, v_base, v_old, draw["flow"], advantage, eta=golden["ram"]["mult"])
    assert loss.item() == pytest.approx(golden["ram"]["loss_mult100_vold"], rel=1e-14)
    on_policy = common.ram_loss(v, v_base, v, draw["flow"], advantage, eta=1.0)
    assert on_policy.item() == pytest.approx(golden["ram"]["loss_mult1_vtheta(eq17)"], rel=1e-14)


def test_ram_has_the_published_numbers():
    draw = golden_draw()
    v = 0.5 * draw["x"] + 0.1 * draw["v"]
    v_base, v_old = 0.45 * draw["x"] + 0.05 * draw["v"], 0.48 * draw["x"] + 0.08 * draw["v"]
    advantage = torch.tensor([0.9, -0.4], dtype=torch.float64).view(2, 1, 1)
    assert common.ram_loss(v, v_base, v_old, draw["flow"], advantage, eta=100.0).item() == pytest.approx(
        3126.3750910046
    )
    assert common.ram_loss(v, v_base, v, draw["flow"], advantage, eta=1.0).item() == pytest.approx(0.3226295695)


@pytest.mark.parametrize("eta", [0.5, 3.0, 100.0])
def test_rams_gradient_is_eta_times_on_policy_uniform_awm_with_kl_weight_one_over_eta(eta):
    """formulas 4, here with a credit for each location: |v-v_ref|^2/eta + credit*error, both means over L and C."""
    v, v_base, _, flow, credit = random_draws()
    v.requires_grad_()
    (ram,) = torch.autograd.grad(common.ram_loss(v, v_base, v.detach(), flow, credit, eta=eta), v)
    error = error_of(v, flow)
    t = torch.ones(3, 2, 1, dtype=torch.float64)
    awm, _ = common.awm_loss(error, error.detach(), t, credit, weighting="uniform", clip_range=1.0)
    (want,) = torch.autograd.grad(awm + (v - v_base).square().mean() / eta, v)
    assert (ram - eta * want).abs().max() <= 1e-12 * max(1, ram.abs().max())


def test_rams_target_has_no_gradient():
    fields = [a.requires_grad_() for a in random_draws()[:4]]
    common.ram_loss(*fields, random_draws()[4], eta=2.0).backward()
    assert fields[0].grad.any() and all(f.grad is None for f in fields[1:])


# ---------------------------------------------------------------- SFT


@pytest.mark.parametrize(
    "rewards, want",
    [
        ([0.1, 0.9, 0.4, 0.9], [0, 1, 0, 1]),  # ties kept
        ([0.5, 0.5, 0.5, 0.5], [0, 0, 0, 0]),  # a group of equal rewards has no best
        ([0.51, 0.5, 0.5, 0.5], [0, 0, 0, 0]),  # nor one under the floor of the std
        ([math.nan, 0.2, 0.9], [0, 0, 1]),
        ([math.nan, math.nan], [0, 0]),
        ([0.7], [0]),
        ([0.0, 1.0], [0, 1]),
    ],
)
def test_best_of_group(rewards, want):
    got = common.best_of_group(torch.tensor(rewards)[:, None], std_floor=0.05)
    assert got[:, 0].tolist() == want


def test_sft_is_the_mean_error_of_the_best():
    """Whatever the group size: not the mean over a mask that is mostly zero."""
    error = torch.rand(6, 2, 4, dtype=torch.float64)
    rewards = torch.tensor([0.1, 0.9, 0.2, 0.9, 0.3, 0.0], dtype=torch.float64)[:, None]
    maps = torch.ones(6, 1, 2, 2, dtype=torch.float64)
    credit = common.credit_map("sum", rewards, maps, std_floor=0.05, advantages=common.best_of_group)
    assert common.sft_loss(error, credit, credit.mean()).item() == pytest.approx(error[[1, 3]].mean().item(), abs=1e-15)
    halves = [common.sft_loss(error[s], credit[s], credit.mean()) * 0.5 for s in (slice(3), slice(3, 6))]
    assert sum(halves).item() == pytest.approx(error[[1, 3]].mean().item(), abs=1e-15)


def test_sft_with_cast_credit_weights_the_error_by_the_maps_of_each_atoms_best():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    maps = torch.zeros(3, 2, 1, 4, dtype=torch.float64)
    maps[:, 0, 0, 0], maps[:, 1, 0, 3] = 4, 4  # atom 0 is about the first location, atom 1 about the last
    credit = common.credit_map("cast", rewards, maps, std_floor=0.05, advantages=common.best_of_group)
    assert credit[:, 0].tolist() == [[2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 2]]
    error = torch.rand(3, 1, 4, dtype=torch.float64)
    want = (error[0, 0, 0] + error[2, 0, 3]) / 2
    assert common.sft_loss(error, credit, credit.mean()).item() == pytest.approx(want.item(), abs=1e-15)


# ---------------------------------------------------------------- all of them


def test_the_losses_pass_the_gradient_check():
    """float64, against finite differences, on and off policy and with credits of both signs."""
    v, v_base, v_old, flow, credit = random_draws()
    t = torch.rand(3, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    v.requires_grad_()
    off = error_of(v_old, flow)
    losses = {
        "ram": lambda v: common.ram_loss(v, v_base, v_old, flow, credit, eta=2.0),
        "sft": lambda v: common.sft_loss(error_of(v, flow), credit.abs(), credit.abs().mean()),
        "kl": lambda v: common.gaussian_kl(v, v_base, torch.tensor(0.3, dtype=torch.float64)).mean(),
        **{
            f"awm {w}": lambda v, w=w: common.awm_loss(error_of(v, flow), off, t, credit, weighting=w, clip_range=1.0)[
                0
            ]
            for w in AWM_KEYS
        },
    }
    for name, loss in losses.items():
        assert torch.autograd.gradcheck(loss, v), name


def test_every_loss_is_blind_where_the_credit_is_zero():
    """A location without credit gets exactly no gradient from AWM and SFT; RAM pulls it to the base alone."""
    v, v_base, v_old, flow, credit = random_draws()
    credit[..., 2:] = 0
    v.requires_grad_()
    error = error_of(v, flow)
    t = torch.rand(3, 2, 1, dtype=torch.float64)
    awm, _ = common.awm_loss(error, error_of(v_old, flow), t, credit, weighting="t", clip_range=1.0)
    for loss in (awm, common.sft_loss(error, credit.abs(), credit.abs().mean())):
        (grad,) = torch.autograd.grad(loss, v, retain_graph=True)
        assert not grad[:, :, 2:].any() and grad[:, :, :2].any()
    (grad,) = torch.autograd.grad(common.ram_loss(v, v_base, v_old, flow, credit, eta=2.0), v)
    want = 2 * (v - v_base).detach()[:, :, 2:] / v.numel()
    assert torch.allclose(grad[:, :, 2:], want, atol=1e-16)


# ---------------------------------------------------------------- draws of the forward process


@pytest.mark.parametrize("times", ["grid", "sqrt", "logit-normal"])
def test_draws_have_their_distribution(times):
    """4,000 samples of 8 stratified draws. Against the cdf: the largest difference of an empirical cdf of n independent
    draws exceeds 1.95/sqrt(n) with probability 1e-3 (Kolmogorov); stratified draws lie closer."""
    x0 = torch.zeros(4000, 1, 1, dtype=torch.float64)
    t, eps = common.forward_draws(x0, 8, times, SIGMAS, [torch.Generator().manual_seed(i) for i in range(4000)])
    assert t.shape == (4000, 8) and eps.shape == (4000, 8, 1, 1) and t.dtype == eps.dtype == torch.float64
    assert ((t > 0) & (t <= 1)).all()
    assert (
        abs(eps.mean()) < 5 / 32000**0.5 and abs(eps.var() - 1) < 5 * (2 / 32000) ** 0.5
    )  # 5 standard errors: 6e-7 each
    if times == "grid":  # each of the inner levels of the grid equally often
        levels, counts = t.unique(return_counts=True)
        assert torch.allclose(levels, SIGMAS[1:-1].flip(0)) and (counts / 32000 - 1 / 5).abs().max() < 0.011
        return
    grid = SIGMAS.flip(0).numpy()
    import numpy as np

    place = np.interp(t.flatten().sort().values.numpy(), grid, np.linspace(0, 1, len(grid)))  # of the schedule
    cdf = (
        t.flatten().sort().values.square() if times == "sqrt" else torch.special.ndtr(torch.logit(torch.tensor(place)))
    )
    assert (cdf - torch.linspace(0, 1, 32000)).abs().max() < 1.95 / 32000**0.5


def test_a_draw_does_not_depend_on_its_batch():
    x0 = torch.zeros(3, 4, 2)
    seeds = [5, 6, 7]
    t, eps = common.forward_draws(x0, 4, "sqrt", SIGMAS.float(), [torch.Generator().manual_seed(s) for s in seeds])
    t1, eps1 = common.forward_draws(x0[:1], 4, "sqrt", SIGMAS.float(), [torch.Generator().manual_seed(6)])
    assert torch.equal(t[1:2], t1) and torch.equal(eps[1:2], eps1) and t.dtype == torch.float32
    assert not torch.equal(t[0], t[1])
    with pytest.raises(ValueError, match="times"):
        common.forward_draws(x0, 4, "none", SIGMAS, [torch.Generator()] * 3)


# ---------------------------------------------------------------- KL of an SDE step


@pytest.mark.parametrize("kind, a", [("flow", 0.7), ("dance", 0.3), ("cps", 0.8)])
def test_kl_is_torchs_for_each_kind_of_step(kind, a):
    """T3d: the std of its own kind. Flow-GRPO's own scale is this times |dt|: mean(dmu^2)/(2 s^2)."""
    g = torch.Generator().manual_seed(0)
    x, v, v_base = torch.randn(3, 2, 4, 5, generator=g, dtype=torch.float64).unbind(0)
    for sigma, sigma_next in ((1.0, 0.9), (0.75, 0.5)):
        step = dict(sigma=sigma, sigma_next=sigma_next, noise_level=a, sigma_max=0.9, kind=kind, x_next=x)
        (_, _, mean, std), (_, _, mean_base, std_base) = (common.sde_step(x, vel, **step) for vel in (v, v_base))
        normal = torch.distributions.Normal
        want = torch.distributions.kl_divergence(normal(mean, std), normal(mean_base, std_base)).mean(-1)
        got = common.gaussian_kl(mean, mean_base, std)
        assert torch.allclose(got, want, rtol=1e-12) and (got > 0).all()
        if kind == "flow":
            s = std / (sigma - sigma_next) ** 0.5
            flow_grpo = (mean - mean_base).square().mean(-1) / (2 * s**2)
            assert torch.allclose(got * (sigma - sigma_next), flow_grpo, rtol=1e-12)


# ---------------------------------------------------------------- the credit of steps


def test_step_credit_is_a_z_score_a_step():
    rewards = torch.rand(6, 3, dtype=torch.float64)
    got = common.credit_map("step", rewards, torch.ones(6, 2, 1, 1), std_floor=1e-3)
    want = (rewards - rewards.mean(0)) / rewards.std(0, correction=0)
    assert got.shape == (6, 3, 1) and torch.allclose(got[..., 0], want, atol=1e-14)


def test_one_reward_for_all_steps_is_sum_credit():
    """Step-GRPO with the final reward at every step is Flow-GRPO."""
    rewards = torch.rand(6, 1, dtype=torch.float64)
    step = common.credit_map("step", rewards.expand(-1, 3), torch.ones(6, 1, 1, 1), std_floor=1e-3)
    whole = common.credit_map("sum", rewards, torch.ones(6, 1, 1, 1, dtype=torch.float64), std_floor=1e-3)
    assert torch.allclose(step, whole.expand(-1, 3, -1), atol=1e-14)
