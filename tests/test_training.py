"""Stage 04's updates on the tiny model: exact accumulation, references, the replay's error, every credit with every objective."""

import copy
import functools
import json
import math
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import common

stage3, stage4 = (common.load_stage(ROOT / f) for f in ("03_score_atoms.py", "04_train_cast.py"))
PROMPTS = ["three red circles to the left of two blue squares", "a green triangle and two red squares"]
ROW = {"csg": {"atoms": [{"depends_on": [1]}, {"depends_on": []}, {"depends_on": [0, 1]}]}}  # of the made-up atoms
GRPO, MATCHING = ["--objective", "grpo"], ["awm", "ram", "sft"]


@functools.cache
def loaded(dtype: torch.dtype):
    """The tiny pipeline and the embeddings [2, S, D] of PROMPTS."""
    pipe = common.load_pipeline(common.PRESETS["tiny"]["model"], "cpu", dtype)
    return pipe, common.encode_prompts(pipe, PROMPTS, max_sequence_length=8, text_encoder_layers=[1, 2, 3])


class Trainer:
    """A LoRA that is not zero on the tiny model, and 2 groups of 4 pictures with made-up rewards and maps."""

    def __init__(self, *argv: str, dtype: torch.dtype = torch.float32, fresh: bool = False, rewards=None):
        if set(argv) & set(MATCHING) and "--draws" not in argv:
            argv = (*argv, "--draws", "2")
        old, sys.argv = sys.argv, ["04", "--run", "unused", "--groups", "2", "--samples", "4", "--batch-groups", "2", "--rank", "4",
                                   "--alpha", "4", "--lr", "1e-3", "--dtype", str(dtype).removeprefix("torch."), *argv]  # fmt: skip
        try:
            self.args = args = stage4.parse(stage3)
        finally:
            sys.argv = old
        args.window = args.window or [0, 3]
        pipe, self.embeds = loaded(dtype)
        self.pipe = copy.copy(pipe)
        self.pipe.transformer = copy.deepcopy(pipe.transformer)
        self.params = stage4.add_lora(self.pipe.transformer, args)
        g = torch.Generator().manual_seed(0)
        if not fresh:
            for name, p in self.params.items():
                if "lora_B" in name:
                    p.data.normal_(0, 0.05, generator=g)
        self.policies = stage4.first_policies(self.params, args)
        if "old" in self.policies and not fresh:  # a lagging LoRA of its own
            for w in self.policies["old"].values():
                w.mul_(0.5)
        if args.checkpointing:
            self.pipe.transformer.enable_gradient_checkpointing()
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=args.lr, weight_decay=args.weight_decay)
        grid = common.latent_grid(self.pipe, args.height, args.width)
        self.sigmas = common.schedule(self.pipe, args.steps, grid[0] * grid[1])
        self.trajectory = t = stage3.rollout(self.pipe, self.embeds, range(8), tuple(args.window), args)
        rewards = torch.rand(2, 4, 3, generator=g) if rewards is None else rewards
        maps = torch.rand(2, 4, 3, *grid, generator=g) + 0.1
        maps /= maps.mean((-2, -1), keepdim=True)
        steps = torch.rand(2, 4, args.window[1] - args.window[0], generator=g)
        self.shards = [
            {"latents": t.latents[s], "log_probs": t.log_probs[s], "x0": t.x0[s], "rewards": rewards[i], "maps": maps[i],
             "seeds": torch.arange(8)[s], "step_rewards": steps[i]}
            for i, s in enumerate((slice(0, 4), slice(4, 8)))
        ]  # fmt: skip
        for i, shard in enumerate(self.shards):
            shard["credit"] = stage4.group_credit(shard, ROW, 0, i, args)

    def update(self, round_: int = 0) -> dict:
        return stage4.update(self.pipe, self.params, self.policies, self.optimizer, self.shards, self.embeds, self.sigmas, round_,
                             self.args)  # fmt: skip

    def gradient(self) -> torch.Tensor:
        """The gradient of an update, all parameters in one vector; the LoRA stays as it is."""
        found = []
        step, self.optimizer.step = (
            self.optimizer.step,
            lambda: found.extend(p.grad.flatten() for p in self.params.values()),
        )
        clip, self.args.max_grad_norm = self.args.max_grad_norm, 0.0
        try:
            self.metrics = self.update()
        finally:
            self.optimizer.step, self.args.max_grad_norm = step, clip
        return torch.cat(found) if found else torch.zeros(1)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.params.values()])


# ---------------------------------------------------------------- T1: the replay


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_replay_gives_ratio_one_in_micro_batches(micro):
    """field_reports T1: 6 steps; |log p - old log p| <= 1e-5 at every step in float32; exactly 0 in the rollout's batch."""
    trainer = Trainer("--window", "0", "6", "--micro-batch", str(micro))
    metrics = trainer.update()
    assert metrics["ratio_minus_1"] <= 1e-5 and len(metrics["gap_p99"]) == 6 and max(metrics["gap_p99"]) <= 1e-5
    assert micro < 8 or metrics["ratio_minus_1"] == 0


@pytest.mark.parametrize("micro", [1, 8])
def test_bfloat16_replays_a_bfloat16_rollout(micro):
    """T1 in bf16: the velocity is rounded, but to the same number in both."""
    trainer = Trainer("--micro-batch", str(micro), dtype=torch.bfloat16)
    assert max(trainer.update()["gap_p99"]) <= 1e-4
    assert (trainer.trajectory.x0 - Trainer().trajectory.x0).abs().max() > 1e-3, "it is bf16"


def test_bfloat16_gap_is_measured_and_refused_above_the_clip_range():
    """A rollout in float32 and its replay in bf16 differ by what bf16 rounds: logged a step, and refused, with both numbers,
    where the clip range is below it."""
    exact = Trainer()
    for clip_range in ("0.2", "1e-4"):
        trainer = Trainer("--clip-range", clip_range, dtype=torch.bfloat16)
        for shard, other in zip(trainer.shards, exact.shards, strict=True):
            shard |= {k: other[k] for k in ("latents", "log_probs")}
        if clip_range == "0.2":
            gap = trainer.update()["gap_p99"]
            assert len(gap) == 3 and all(1e-4 < g < 0.2 for g in gap)
            continue
        before = trainer.weights()
        with pytest.raises(common.UserError) as e:
            trainer.update()
        assert f"the 99th percentile of |ratio-1| is {max(gap):.1e}, more than --clip-range 0.0001" in str(e.value)
        assert torch.equal(trainer.weights(), before)


def test_latents_rounded_to_bfloat16_trip_the_check():
    trainer = Trainer()
    for shard in trainer.shards:
        shard["latents"] = shard["latents"].bfloat16().float()
    with pytest.raises(common.UserError, match="--max-ratio-gap 1e-05"):
        trainer.update()


# ---------------------------------------------------------------- T3: KL and references


@pytest.mark.parametrize(
    "argv",
    [GRPO, [*GRPO, "--sde", "dance"], [*GRPO, "--sde", "cps"], [*GRPO, "--kl", "flow-grpo"], ["--objective", "awm"]],
)
def test_kl_alone_gives_a_gradient_and_beta_zero_none(argv):
    """T3 a and b: all rewards equal, so the credit is 0."""
    equal = torch.full((2, 4, 3), 0.5)
    off = ["--beta-old", "0"] if "awm" in argv else []
    assert Trainer(*argv, *off, "--beta", "0.1", rewards=equal).gradient().norm() > 1e-6
    assert not Trainer(*argv, *off, "--beta", "0", rewards=equal).gradient().any()


@pytest.mark.parametrize("objective", ["grpo", "awm"])
def test_a_fresh_lora_has_kl_zero(objective):
    """T3 c: B = 0 is the base, bit for bit."""
    trainer = Trainer("--objective", objective, "--beta", "0.1", fresh=True)
    trainer.gradient()
    assert trainer.metrics["kl_base"] == 0


def test_kl_to_the_base_is_the_gaussians():
    """Against torch.distributions on the adapter-off network; Flow-GRPO's scale is |dt| of that a step."""
    trainer = Trainer("--beta", "0.1")
    trainer.gradient()
    latents = torch.cat([s["latents"] for s in trainer.shards])
    embeds = trainer.embeds.repeat_interleave(4, 0)
    velocity = common.velocity_fn(trainer.pipe, embeds, (4, 4), trainer.args.guidance)
    kls = []
    for i in range(3):
        steps = []
        for adapter_off in (False, True):
            if adapter_off:
                trainer.pipe.transformer.disable_adapters()
            with torch.no_grad():
                v = velocity(latents[:, i].contiguous(), trainer.sigmas[i])
            trainer.pipe.transformer.enable_adapters()
            _, _, mean, std = common.sde_step(latents[:, i], v, trainer.sigmas[i], trainer.sigmas[i + 1], noise_level=1.0,
                                              sigma_max=trainer.sigmas[1], x_next=latents[:, i + 1])  # fmt: skip
            steps.append(torch.distributions.Normal(mean, std))
        kls.append(torch.distributions.kl_divergence(*steps).mean())
    assert trainer.metrics["kl_base"] == pytest.approx(torch.stack(kls).mean().item(), rel=1e-4)


@pytest.mark.parametrize("objective", ["awm", "ram"])
def test_references_stay_as_they_are(objective):
    """T3 e: after an update that evaluates them; and they are no part of the trained network."""
    trainer = Trainer("--objective", objective, "--ema", "0.9")
    names = {k: id(p) for k, p in trainer.params.items()}
    before = {n: {k: w.clone() for k, w in trainer.policies[n].items()} for n in ("base", "old")}
    weights = trainer.weights()
    trainer.update()
    for name, ws in before.items():
        assert all(torch.equal(w, trainer.policies[name][k]) for k, w in ws.items())
        assert not any(w.requires_grad for w in trainer.policies[name].values())
    assert not torch.equal(trainer.weights(), weights) and names == {k: id(p) for k, p in trainer.params.items()}
    assert all(p.requires_grad for p in trainer.params.values())
    held = {w.data_ptr() for ws in trainer.policies.values() for w in ws.values()}
    assert not held & {p.data_ptr() for p in trainer.params.values()}, "a copy aliases the LoRA"


def test_policy_restores_every_bit_also_after_an_error():
    trainer = Trainer("--objective", "ram")
    before = trainer.weights()
    with pytest.raises(RuntimeError), stage4.policy(trainer.params, trainer.policies["base"]):
        assert not trainer.weights().any() and common.lora_digest(trainer.pipe.transformer) == "base"
        raise RuntimeError
    assert torch.equal(trainer.weights(), before)


@pytest.mark.parametrize("objective", ["grpo", *MATCHING])
def test_the_gradient_sees_the_rewards(objective):
    """T3 f: two pictures' rewards swapped is another gradient."""
    rewards = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(3))
    a, b = (Trainer("--objective", objective, rewards=r).gradient() for r in (rewards, rewards[:, [1, 0, 2, 3]]))
    assert (a - b).norm() > 0.01 * a.norm()


def test_ema_moves_once_an_optimizer_step():
    trainer = Trainer("--ema", "0.9", "--updates", "2", "--batch-groups", "1", "--micro-batch", "1")
    seen = [{k: w.clone() for k, w in trainer.policies["ema"].items()}]
    want = seen[0]
    step = trainer.optimizer.step

    def recording_step():
        step()
        seen.append({k: p.detach().clone() for k, p in trainer.params.items()})

    trainer.optimizer.step = recording_step
    trainer.update()
    assert len(seen) == 3, "2 steps of 4 micro-batches each"
    for count, now in enumerate(seen[1:]):
        decay = min((1 + count) / (10 + count), 0.9)
        want = {k: decay * want[k] + (1 - decay) * now[k] for k in want}
    assert all(torch.allclose(trainer.policies["ema"][k], w, atol=1e-8) for k, w in want.items())


# ---------------------------------------------------------------- T5: accumulation


@pytest.mark.parametrize("argv", [["--beta", "0.01"], *(["--objective", o] for o in MATCHING)], ids=["grpo", *MATCHING])
def test_accumulation_is_exact(argv):
    """T5: 8x1 = 4x2 = 1x8, uneven parts and activation checkpointing: the same gradient but for float32's rounding, and after a
    step of AdamW at a usual learning rate the same weights to 1e-6: all whose gradient is more than rounding, since AdamW's
    first step is the gradient's sign."""
    argv = [*argv, "--lr", "1e-4"]
    whole = Trainer(*argv)
    want = whole.gradient()
    assert want.norm() > 0
    whole.update()
    for extra in (["1"], ["3"], ["2", "--checkpointing"]):
        parts = Trainer(*argv, "--micro-batch", *extra)
        before = parts.weights()
        assert (parts.gradient() - want).norm() <= 3e-6 * want.norm(), extra
        parts.update()
        assert (whole.weights() - parts.weights()).norm() <= 1e-3 * (whole.weights() - before).norm(), extra
        clear = want.abs() > 1e-3 * want.abs().max()
        assert clear.float().mean() > 0.1 and (parts.weights() - whole.weights())[clear].abs().max() <= 1e-6, extra


def test_the_gradient_is_scaled_down_to_its_largest_norm():
    trainer = Trainer("--max-grad-norm", "1e-5")
    norms = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        norms.append(math.hypot(*(p.grad.norm().item() for p in trainer.params.values()))),
        step(),
    )
    metrics = trainer.update()
    assert norms == [pytest.approx(1e-5, rel=1e-3)] and metrics["grad_norm"] > 1e-5


# ---------------------------------------------------------------- credits and ratios


def test_constant_credit_with_the_ratio_of_a_sample_is_flow_grpo():
    """Written out as Flow-GRPO has it: the mean log-prob of a picture, its ratio, max(-A r, -A clip r), mean over pictures."""
    trainer = Trainer("--credit", "sum", "--ratio", "sample", "--clip-range", "1e-4")
    got = trainer.gradient()
    velocity = common.velocity_fn(trainer.pipe, trainer.embeds.repeat_interleave(4, 0), (4, 4), 4.0)
    latents, old = trainer.trajectory.latents, trainer.trajectory.log_probs.mean(-1)
    rewards = torch.stack([s["rewards"].mean(-1) for s in trainer.shards])
    advantage = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True).clamp(min=0.05)
    loss = 0.0
    for i in range(3):
        x = latents[:, i].contiguous()
        log_prob = common.sde_step(x, velocity(x, trainer.sigmas[i]), trainer.sigmas[i], trainer.sigmas[i + 1], noise_level=1.0,
                                   sigma_max=trainer.sigmas[1], x_next=latents[:, i + 1])[1].mean(-1)  # fmt: skip
        ratio, a = (log_prob - old[:, i]).exp(), advantage.flatten()
        loss = loss + torch.maximum(-a * ratio, -a * ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean() / 3
    want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trainer.params.values()))])
    assert (got - want).norm() <= 1e-5 * want.norm()
    # before a step the ratio of a location has the same gradient
    located = Trainer("--credit", "sum").gradient()
    assert (located - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("objective", ["grpo", *MATCHING])
def test_atom_credit_is_cast_credit_with_uniform_maps(objective):
    atom = Trainer("--objective", objective, "--credit", "atom").gradient()
    cast = Trainer("--objective", objective, "--credit", "cast", "--map-floor", "1").gradient()
    sharp = Trainer("--objective", objective, "--credit", "cast", "--map-floor", "0").gradient()
    assert (atom - cast).norm() <= 1e-5 * atom.norm() and (sharp - atom).norm() > 0.01 * atom.norm()


@pytest.mark.parametrize("objective, credit", [*product(["grpo", *MATCHING], stage4.CREDITS[:-1]), ("grpo", "step")])
def test_every_credit_goes_with_every_objective(objective, credit):
    gradient = Trainer("--objective", objective, "--credit", credit).gradient()
    assert gradient.isfinite().all() and gradient.norm() > 0


def test_gate_multiplies_the_rewards_of_the_atoms_that_an_atom_depends_on():
    r = torch.tensor([[0.5, 0.4, 0.25], [1.0, 0.0, 1.0], [1.0, 1.0, math.nan]])
    gated = stage4.gated(r, [a["depends_on"] for a in ROW["csg"]["atoms"]])
    assert torch.allclose(
        gated, torch.tensor([[0.2, 0.4, 0.05], [0.0, 0.0, 0.0], [1.0, 1.0, math.nan]]), equal_nan=True
    )
    rewards = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1))
    with_gate = Trainer("--credit", "cast", "--gate", "parents", rewards=rewards).gradient()
    by_hand = torch.stack([stage4.gated(r, [[1], [], [0, 1]]) for r in rewards])
    assert torch.equal(with_gate, Trainer("--credit", "cast", rewards=by_hand).gradient())
    assert not torch.equal(with_gate, Trainer("--credit", "cast", rewards=rewards).gradient())


@pytest.mark.parametrize(
    "csg", [None, 3, {}, {"atoms": 1}, {"atoms": [{"depends_on": [9]}]}, {"atoms": [{"depends_on": ["0"]}]}]
)
def test_gate_needs_the_graph(run_stage, atoms_run, csg):
    rows = common.read_atoms(atoms_run / "atoms.jsonl")
    rows[3] |= {"csg": csg, "vqa_list": rows[3]["vqa_list"][:1], "skills": rows[3]["skills"][:1]}
    common.write_text(atoms_run / "atoms.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    out = start(run_stage, atoms_run, "--window", 0, 3, "--gate", "parents", "--rounds", 1, code=2)
    assert "error: --gate parents: " in out and "02_build_csg.py writes that" in out


def test_sft_takes_no_step_without_a_best_picture():
    trainer = Trainer("--objective", "sft", rewards=torch.full((2, 4, 3), 0.5))
    before = trainer.weights()
    metrics = trainer.update()
    assert metrics["steps"] == 0 and torch.equal(trainer.weights(), before)


def test_awm_compares_with_the_rollouts_policy_after_the_first_step():
    trainer = Trainer(
        "--objective", "awm", "--updates", "2", "--batch-groups", "1", "--micro-batch", "4", "--lr", "0.05"
    )
    assert trainer.update()["approx_kl"] > 0
    once = Trainer("--objective", "awm")
    assert once.update()["approx_kl"] == 0


# ---------------------------------------------------------------- the command line


def start(run_stage, run: Path, *argv: object, code: int | None = None) -> str:
    return "".join(
        run_stage(
            "04_train_cast.py",
            stage4.main,
            "--run",
            run,
            "--groups",
            2,
            "--samples",
            4,
            "--batch-groups",
            1,
            *argv,
            code=code,
        )
    )


@pytest.fixture
def atoms_run(run_stage, tmp_path) -> Path:
    csg = common.load_stage(ROOT / "02_build_csg.py")
    run_stage("02_build_csg.py", csg.main, "--run", tmp_path, "--sample", 8)
    return tmp_path


@pytest.mark.parametrize(
    "argv, says",
    [
        (
            ["--objective", "ram", "--beta", "0.1"],
            "--beta: --objective ram has no such setting; it is of grpo, awm, sft",
        ),
        (["--objective", "sft", "--clip-range", "1"], "--clip-range: --objective sft has no such setting"),
        (["--draws", "3"], "--draws: --objective grpo has no such setting; it is of awm, ram, sft"),
        (["--train-guidance", "1"], "--train-guidance 1.0: --objective grpo needs the rollout's, 4.0"),
        (["--ratio", "sample"], "--ratio sample: --credit cast differs by location"),
        (["--objective", "awm", "--credit", "step"], "--credit step: its rewards belong to SDE steps"),
        (["--window", "0", "0"], "--window 0 0: has no SDE step"),
        (["--window", "0", "3", "--credit", "step"], "has no step_rewards of shape [4, 3]"),
        (["--objective", "awm", "--lag", "0.1", "2"], "--lag 2.0: must be from 0 to 1"),
        (["--credit", "step", "--gate", "parents"], "--gate parents: --credit step takes the rewards of steps"),
        (["--micro-batch", "0"], "--micro-batch 0: must be from 1"),
        (["--ema", "1"], "--ema 1.0: must be from 0"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(run_stage, atoms_run, argv, says):
    out = start(run_stage, atoms_run, *argv, "--rounds", 1, code=2)
    assert [says in line for line in out.splitlines() if line.startswith("error: ")] == [True], out
    assert not (atoms_run / "lora").exists()


def test_ram_with_ema_resumes_in_the_same_bits(run_stage, atoms_run, tmp_path_factory):
    """T9: the lagging and the averaged LoRA too, and the rollouts of the lagging one; lora/ has the average."""
    argv = ["--objective", "ram", "--ema", 0.8, "--lag", 0.3, 0.9, "--draws", 2, "--updates", 2, "--save-every", 100]
    parts = tmp_path_factory.mktemp("parts")
    (parts / "atoms.jsonl").write_bytes((atoms_run / "atoms.jsonl").read_bytes())
    start(run_stage, atoms_run, *argv, "--rounds", 4)
    for rounds in (2, 3, 4):
        start(run_stage, parts, *argv, "--rounds", rounds)
    a, b = (common.read_tensors(r / "state" / "state.safetensors")[0] for r in (atoms_run, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    kinds = {k.split(".")[0] for k in a}
    assert kinds == {"param", "old", "ema", "step", "exp_avg", "exp_avg_sq"}
    name = next(k.removeprefix("param.") for k in a if k.startswith("param.") and "lora_B" in k)
    assert len({tuple(a[f"{kind}.{name}"].flatten().tolist()) for kind in ("param", "old", "ema")}) == 3
    saved, _ = common.read_tensors(atoms_run / "lora" / "round_0004" / "pytorch_lora_weights.safetensors")
    assert any(v.shape == a[f"ema.{name}"].shape and torch.equal(v, a[f"ema.{name}"]) for v in saved.values())
    made = [common.read_tensors(p)[1]["lora"] for p in sorted((parts / "shards").glob("*/00000.safetensors"))]
    assert len(set(made)) == len(made), "each round has its own policy"


def test_matching_rolls_out_by_the_ode_with_a_noise_a_picture(run_stage, atoms_run):
    start(run_stage, atoms_run, "--objective", "awm", "--draws", 1, "--rounds", 1)
    shard, metadata = common.read_tensors(atoms_run / "shards" / "round_0000" / "00000.safetensors")
    assert metadata["window"] == "[0, 0]" and shard["latents"].shape[1] == shard["log_probs"].shape[1] == 0
    assert len({tuple(x.flatten().tolist()) for x in shard["x0"]}) == 4, "--same-noise would make them one picture"
    start(run_stage, atoms_run, "--objective", "awm", "--draws", 1, "--rounds", 2)  # continues on its own shards
