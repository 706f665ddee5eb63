"""The sampler, the advantages, the credit and the loss against golden values, closed forms and degenerate cases."""

import json
import math

import pytest
import torch
from conftest import ROOT

import common

GOLDEN = ROOT.parent / "shared" / "golden" / "golden_sde.json"


# ---------------------------------------------------------------- sde_step


@pytest.fixture(scope="module")
def golden() -> dict:
    """Values of the peers' own functions. Input: x = (i-11.5)/8, v = .9 sin(.7 i), noise = cos(1.3 i + .4), shape 2x2x2x3."""
    if not GOLDEN.exists():
        pytest.skip("the golden file is not beside this checkout")
    return json.loads(GOLDEN.read_text())


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    i = torch.arange(24, dtype=torch.float64)
    return tuple(t.reshape(2, 4, 3).to(dtype) for t in ((i - 11.5) / 8, 0.9 * (0.7 * i).sin(), (1.3 * i + 0.4).cos()))


SIGMAS = [1.0, 0.9, 0.75, 0.5, 0.0]


def test_flow_step_has_the_published_numbers():
    """formulas 13, in the test itself so that it runs without the golden file: std, mean, log-density of all four steps."""
    x, v, noise = inputs()
    want = [
        (0.7, [-1.0853125, -1.0489170919, -0.9852529757], [-0.8103512846, -0.8106808095]),
        (0.8133265027, [-0.90921875, -0.9384331378, -0.9167232134], [-0.9604035808, -0.9607331057]),
        (0.6062177826, [-1.0853125, -1.1713989796, -1.1726116056], [-0.6665102483, -0.6668397733]),
        (0.4949747468, [-1.0853125, -1.3518604593, -1.4486607112], [-0.4637776943, -0.4641072192]),
    ]
    for i, (std, mean, log_prob) in enumerate(want):
        _, _, m, s = common.sde_step(x, v, SIGMAS[i], SIGMAS[i + 1], noise_level=0.7, sigma_max=SIGMAS[1], x_next=x)
        _, lp, _, _ = common.sde_step(
            x, v, SIGMAS[i], SIGMAS[i + 1], noise_level=0.7, sigma_max=SIGMAS[1], x_next=m + s * noise
        )
        assert s.item() == pytest.approx(std, abs=1e-10)
        assert m[0, 0].tolist() == pytest.approx(mean, abs=1e-10)
        assert lp.mean(1).tolist() == pytest.approx(log_prob, abs=1e-10)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind, key", [("flow", "flow_sde"), ("dance", "dance_sde"), ("cps", "cps")])
def test_step_equals_the_golden_file(golden, kind, key, dtype, tolerance):
    x, v, _ = inputs(dtype)
    for i, want in enumerate(golden[key]):
        drawn = torch.tensor(want["next"], dtype=torch.float64).reshape(2, 4, 3)
        a = want.get("eta", golden["meta"]["a"])
        _, log_prob, mean, std = common.sde_step(
            x, v, SIGMAS[i], SIGMAS[i + 1], noise_level=a, sigma_max=SIGMAS[1], kind=kind, x_next=drawn.to(dtype)
        )
        assert (
            mean.double() - torch.tensor(want["mean"], dtype=torch.float64).reshape(2, 4, 3)
        ).abs().max() < tolerance
        assert abs(std.item() - want.get("step_std", want.get("std"))) < tolerance
        density = want["true_gaussian_logp_mean"] if kind == "cps" else want["logp_mean"]
        if std > 0:  # the last CPS step is deterministic
            assert (log_prob.double().mean(1) - torch.tensor(density, dtype=torch.float64)).abs().max() < 3 * tolerance


def test_replay_has_the_density_of_the_draw_and_gradient_reaches_the_velocity_only():
    x, v, _ = inputs()
    v.requires_grad_()
    drawn, lp, mean, std = common.sde_step(
        x, v, 0.7, 0.5, noise_level=1.0, sigma_max=0.9, generator=torch.Generator().manual_seed(0)
    )
    again, lp2, _, _ = common.sde_step(x, v, 0.7, 0.5, noise_level=1.0, sigma_max=0.9, x_next=drawn.detach())
    assert torch.equal(lp, lp2) and torch.equal(again, drawn)
    normal = torch.distributions.Normal(mean, std).log_prob(drawn.detach()).mean(-1)
    assert torch.allclose(lp, normal, atol=1e-14)
    lp2.sum().backward()
    assert v.grad.abs().min() > 0


def test_log_density_does_not_depend_on_resolution():
    """A mean over channels: the same value whether a picture has 4 or 4096 tokens."""
    x, v, _ = inputs()
    small = common.sde_step(x, v, 0.7, 0.5, noise_level=1.0, sigma_max=0.9, x_next=x)[1]
    big = common.sde_step(
        x.repeat(1, 99, 1), v.repeat(1, 99, 1), 0.7, 0.5, noise_level=1.0, sigma_max=0.9, x_next=x.repeat(1, 99, 1)
    )[1]
    assert torch.allclose(big, small.repeat(1, 99))


def test_first_step_has_std_a_on_a_uniform_grid():
    """sigma = 1 in 1-sigma is replaced by sigmas[1], so s_0*sqrt(-dt) = a exactly (formulas 1)."""
    x, v, _ = inputs()
    for step in (0.1, 0.02):
        std = common.sde_step(x, v, 1.0, 1 - step, noise_level=0.7, sigma_max=1 - step, x_next=x)[3]
        assert std.item() == pytest.approx(0.7, abs=1e-12)


def test_ode_step_is_euler_and_its_density_is_not_taken():
    x, v, _ = inputs()
    for kwargs in ({"noise_level": 0.0}, {"noise_level": 0.7, "kind": "ode"}):
        new, log_prob, mean, std = common.sde_step(x, v, 0.5, 0.0, sigma_max=0.9, **kwargs)
        assert torch.equal(new, x - 0.5 * v) and torch.equal(mean, new)
        assert not log_prob.any() and std == 0


# ---------------------------------------------------------------- sample


def gaussian_velocity(m: float, s: float):
    """The exact velocity of x0 ~ N(m, s^2): E[eps - x0 | x] of the joint Gaussian."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        variance = (1 - sigma) ** 2 * s**2 + sigma**2
        slope = (sigma - (1 - sigma) * s**2) / variance
        return slope * (x - (1 - sigma) * m) - m

    return velocity


@pytest.mark.parametrize("kind, a", [("flow", 0.0), ("flow", 0.7), ("dance", 0.5)])
def test_ode_and_sde_end_in_the_same_gaussian(kind, a):
    """100 steps, 50,000 draws. Standard error of the mean s/sqrt(n), of the std s/sqrt(2n): a correct sampler leaves
    5 of these with a probability under 6e-7 each; the allowance of 0.01 is for the finite steps."""
    m, s, n = 0.4, 0.5, 50_000
    x = torch.randn(n, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sigmas = torch.linspace(1, 0, 101, dtype=torch.float64)
    x0 = common.sample(
        gaussian_velocity(m, s), x, sigmas, window=(0, 99), noise_level=a, kind=kind,
        generators=torch.Generator().manual_seed(2),
    ).x0  # fmt: skip
    assert x0.mean().item() == pytest.approx(m, abs=5 * s / n**0.5 + 0.01)
    assert x0.std().item() == pytest.approx(s, abs=5 * s / (2 * n) ** 0.5 + 0.01)


def test_sample_is_sde_inside_the_window_and_ode_outside():
    x = torch.randn(3, 5, 2)
    sigmas = torch.tensor([1, 0.8, 0.6, 0.4, 0.2, 0.0])
    seen = []
    t = common.sample(
        lambda x, s: 0.3 * x, x, sigmas, window=(1, 3), noise_level=0.7, generators=[torch.Generator().manual_seed(i) for i in range(3)],
        on_step=lambda i, x, v: seen.append((i, x)),
    )  # fmt: skip
    assert [i for i, _ in seen] == [0, 1, 2, 3, 4]
    assert t.latents.shape == (3, 3, 5, 2) and t.log_probs.shape == (3, 2, 5)
    assert torch.equal(t.latents[:, 0], x + 0.3 * x * (sigmas[1] - sigmas[0]))
    assert torch.equal(torch.stack([x for i, x in seen if i in (1, 2, 3)], 1), t.latents)
    end = t.latents[:, -1]
    for i in (3, 4):
        end = end + 0.3 * end * (sigmas[i + 1] - sigmas[i])
    assert torch.equal(end, t.x0)
    assert t.log_probs.abs().min() > 0


def test_a_sample_does_not_depend_on_its_batch():
    x, sigmas = torch.randn(4, 5, 2), torch.linspace(1, 0, 6)

    def run(rows):
        return common.sample(lambda x, s: 0.3 * x, x[rows], sigmas, window=(0, 3), noise_level=1.0,
                             generators=[torch.Generator().manual_seed(i) for i in rows])  # fmt: skip

    assert torch.equal(run([0, 1, 2, 3]).x0[2:3], run([2]).x0)
    assert torch.equal(run([3, 1]).log_probs[0], run([1, 3]).log_probs[1])


@pytest.mark.parametrize("window", [(0, 5), (3, 2), (-1, 2), (4, 6)])
def test_sample_refuses_a_window_outside_the_steps_or_with_the_last_step(window):
    with pytest.raises(ValueError, match="never an SDE step"):
        common.sample(lambda x, s: x, torch.randn(1, 2, 2), torch.linspace(1, 0, 6), window=window, noise_level=1.0)


# ---------------------------------------------------------------- knee, seeds


def test_knee():
    assert common.knee([0.0, 0.6, 0.9, 0.97, 0.99, 1.0]) == 2  # distances to the chord 0 .40 .50 .37 .19 0
    assert common.knee([0.0, 0.5, 1.0, 0.9, 0.8]) == 2  # straight up, then a plateau
    assert common.knee([0, 0.1, 0.3, 0.6, 0.9, 0.89, 0.88, 0.88]) == 4  # convex up, then falling a little
    assert common.knee([0.1, 0.1]) == 0
    tau = torch.linspace(0, 1, 51)
    assert common.knee((1 - (-tau / 0.08).exp()).tolist()) == 10  # of 1-e^(-t/c): t = -c ln(c (1-e^(-1/c))) = 0.202


def test_seeds_are_distinct_and_a_function_of_their_parts():
    seeds = {common.sample_seed(s, r, p, i) for s in range(3) for r in range(10) for p in range(20) for i in range(8)}
    assert len(seeds) == 3 * 10 * 20 * 8 and all(0 <= s < 2**62 for s in seeds)
    assert common.sample_seed(1, 2, 3, 4) == 3083270219967550055


# ---------------------------------------------------------------- advantages and credit


@pytest.mark.parametrize(
    "rewards, want",
    [
        ([1, math.nan, 3], [-1, 0, 1]),
        ([5], [0]),
        ([2, 2, 2, 2], [0, 0, 0, 0]),
        ([math.nan, math.nan], [0, 0]),
        ([1, 0, 0, 0], [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ([0.1, 0.4, 0.4, 0.9], [-1.218544, -0.174078, -0.174078, 1.566700]),
    ],
)
def test_advantages(rewards, want):
    """field_reports T4."""
    got = common.atom_advantages(torch.tensor(rewards, dtype=torch.float64)[:, None], std_floor=1e-3)
    assert got[:, 0].tolist() == pytest.approx(want, abs=1e-5)


def test_std_floor_keeps_a_saturated_atom_quiet():
    rewards = torch.tensor([[0.999], [0.998]])
    assert common.atom_advantages(rewards, std_floor=0.05).abs().max() < 0.011
    assert common.atom_advantages(rewards, std_floor=1e-6).abs().max() == pytest.approx(1, abs=1e-3)


def group(n: int = 6, k: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    maps = torch.rand(n, k, 2, 4, generator=g, dtype=torch.float64)
    return torch.rand(n, k, generator=g, dtype=torch.float64), maps / maps.mean((2, 3), keepdim=True)


def credit(kind: str, rewards: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    out = common.credit_map(kind, rewards, maps, std_floor=1e-3, generator=torch.Generator().manual_seed(0))
    return out.expand(-1, -1, maps[0, 0].numel())


def test_cast_credit_is_its_formula():
    rewards, maps = group()
    a = (rewards - rewards.mean(0)) / rewards.std(0, correction=0)
    want = torch.einsum("nk,nkhw->nhw", a, maps).flatten(1)[:, None] / 3
    assert torch.allclose(credit("cast", rewards, maps), want, atol=1e-14)
    assert torch.allclose(credit("cast", rewards, maps).mean(-1), credit("atom", rewards, maps).mean(-1), atol=1e-14)


def test_degenerate_credits_coincide():
    rewards, maps = group()
    flat = torch.ones_like(maps)
    equal = rewards[:, :1].expand(-1, 3)
    assert torch.allclose(credit("cast", rewards, flat), credit("atom", rewards, maps))  # uniform maps
    assert torch.allclose(credit("shuffled", rewards, flat), credit("atom", rewards, maps))
    assert torch.allclose(credit("spatial", rewards, flat), credit("sum", rewards, maps))
    assert torch.allclose(credit("atom", equal, maps), credit("sum", equal, maps))  # equal atoms
    assert torch.allclose(credit("cast", equal, maps), credit("spatial", equal, maps))
    assert torch.allclose(credit("spatial", rewards[:, :1], maps[:, :1]), credit("cast", rewards[:, :1], maps[:, :1]))
    for kind in ("sum", "atom", "spatial", "shuffled", "cast"):
        assert torch.allclose(credit(kind, -rewards, maps), -credit(kind, rewards, maps))
        assert credit(kind, rewards, maps).isfinite().all() and credit(kind, rewards, maps).any()


@pytest.mark.parametrize("k", [2, 3, 7])
def test_shuffled_is_a_derangement(k):
    """Maps that are one-hot in their own atom show where each went: never to itself."""
    maps = torch.eye(k)[None, :, None, :].expand(4, -1, -1, -1) * k
    rewards = torch.rand(4, k)
    for seed in range(20):
        got = common.credit_map(
            "shuffled", rewards, maps, std_floor=1e-3, generator=torch.Generator().manual_seed(seed)
        )[:, 0]
        own = common.atom_advantages(rewards, std_floor=1e-3)
        order = [(got - own[:, i : i + 1]).abs().sum(0).argmin().item() for i in range(k)]
        assert sorted(order) == list(range(k)) and all(i != j for i, j in enumerate(order))
    with pytest.raises(ValueError, match="at least 2"):
        common.credit_map("shuffled", rewards[:, :1], maps[:, :1], std_floor=1e-3)


def test_nan_rewards_give_finite_credit():
    rewards, maps = group()
    rewards[2, 1] = math.nan
    for kind in ("sum", "atom", "spatial", "shuffled", "cast"):
        assert credit(kind, rewards, maps).isfinite().all()
    rewards[:, 0] = math.nan
    assert credit("cast", rewards, maps).isfinite().all()


# ---------------------------------------------------------------- the loss


def test_loss_has_the_golden_ppo_value(golden):
    p = golden["ppo"]
    new, old, adv = (torch.tensor(p[k], dtype=torch.float64)[:, None, None] for k in ("logp_new", "logp_old", "adv"))
    loss, info = common.grpo_loss(new, old, adv, clip_range=p["clip"])
    assert loss.item() == pytest.approx(p["loss"], abs=1e-15)
    assert info["ratio_gap"].max().item() == pytest.approx(max(abs(r - 1) for r in p["ratio"]), abs=1e-12)


def test_loss_clips_one_side_only():
    """max(-A r, -A clip(r)): a ratio that the advantage already pushed far enough gets no gradient."""
    old = torch.zeros(4, 1, 1, dtype=torch.float64)
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64)[:, None, None].requires_grad_()
    c = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)[:, None, None]
    loss, info = common.grpo_loss(new, old, c, clip_range=0.2)
    loss.backward()
    assert [g != 0 for g in new.grad.flatten().tolist()] == [False, True, True, False]
    assert info["clip_fraction"] == 1


def test_constant_credit_has_flow_grpos_gradient_and_zero_map_has_none():
    lp = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    common.grpo_loss(lp, lp.detach(), a[:, None, None], clip_range=0.2)[0].backward()
    assert torch.allclose(
        lp.grad, (-a / (3 * 2 * 8))[:, None, None].expand(3, 2, 8)
    )  # of -mean(A * scalar ratio) at ratio 1
    lp.grad = None
    masked = torch.ones(3, 1, 8, dtype=torch.float64)
    masked[..., 5:] = 0
    common.grpo_loss(lp, lp.detach() - 0.1, a[:, None, None] * masked, clip_range=0.2)[0].backward()
    assert not lp.grad[..., 5:].any() and lp.grad[..., :5].all()


def test_loss_passes_the_gradient_check():
    lp = (0.05 * torch.randn(2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).requires_grad_()
    c = torch.randn(2, 1, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda lp: common.grpo_loss(lp, torch.zeros_like(lp), c, clip_range=0.2)[0], lp)
