"""The five stages on the tiny world: same numbers as diffusers, exact resume, errors that a user can act on."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

import common

MODELS = ROOT / "tests" / "tiny" / "models"
SMALL = ["--groups", "4", "--samples", "4", "--batch-groups", "2", "--window", "0", "3"]


def run(script: str, *argv: str, expect: int = 0) -> str:
    """Runs a stage in this process; returns what it printed. A stage must leave with `expect`."""
    out, old = io.StringIO(), sys.argv
    sys.argv = [script, *map(str, argv)]
    try:
        with redirect_stdout(out), redirect_stderr(out):
            code = 0
            try:
                common.run_main(common.load_stage(ROOT / script).main)
            except SystemExit as e:
                code = e.code or 0
    finally:
        sys.argv = old
    assert code == expect, f"{script} {argv} left with {code}:\n{out.getvalue()}"
    return out.getvalue()


def fails(script: str, *argv: str) -> str:
    """The one line of a refused start."""
    lines = [line for line in run(script, *argv, expect=2).splitlines() if line.startswith("error:")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture(scope="module")
def pipe():
    pipe = common.load_pipeline(str(MODELS / "flux2"), "cpu", torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def atoms_run(tmp_path) -> Path:
    """A run with atoms and a window, ready for stages 03 and 04."""
    run("02_build_csg.py", "--run", tmp_path, "--sample", "12")
    return tmp_path


# ---------------------------------------------------------------- the same numbers as diffusers


def test_ode_sampling_and_decoding_equal_the_pipeline(pipe):
    prompts = [
        "three red circles to the left of two blue squares",
        "a green triangle",
        "two blue circles and a red square",
    ]
    text = dict(max_sequence_length=8, text_encoder_out_layers=(1, 2, 3))
    want = {
        kind: pipe(
            prompt=prompts, height=32, width=32, num_inference_steps=10, guidance_scale=4.0, output_type=kind,
            generator=[torch.Generator().manual_seed(s) for s in (5, 6, 7)], **text,
        ).images
        for kind in ("latent", "pt")
    }  # fmt: skip
    embeds = common.encode_prompts(pipe, prompts, max_sequence_length=8, text_encoder_layers=[1, 2, 3])
    grid = common.latent_grid(pipe, 32, 32)
    got = common.sample(
        common.velocity_fn(pipe, embeds, grid, 4.0), common.start_noise(pipe, grid, [5, 6, 7]),
        common.schedule(pipe, 10, grid[0] * grid[1]),
    ).x0  # fmt: skip
    assert (got - want["latent"]).abs().max() <= 1e-6
    assert (common.decode(pipe, got, grid) - want["pt"]).abs().max() <= 1e-6


def test_embeddings_tell_prompts_apart(pipe):
    """A prompt that is cut off by max_sequence_length would make these equal, in silence."""
    prompts = [
        "three red circles to the left of two blue squares",
        "three red circles to the left of two blue triangles",
    ]
    a, b = common.encode_prompts(pipe, prompts, max_sequence_length=8, text_encoder_layers=[1, 2, 3])
    assert (a - b).abs().max() > 0.1


def test_soft_tifa_equals_one_question_at_a_time():
    """The shared prefix and the padded batch change no score: against plain calls of the VLM, question by question."""
    stage = common.load_stage(ROOT / "03_score_atoms.py")
    scorer = stage.load_scorer(str(MODELS / "qwen3vl"), "cpu", torch.float32, [0, 1])
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    vqa = [["How many circles are in the image?", "two"], ["Are the squares to the left of the circle?", "Yes"],
           ["Is the circle red?", "Yes"], ["Are there any triangles in the image?", "Yes"]]  # fmt: skip
    rewards, maps = stage.score(scorer, images, vqa, (4, 4))
    assert rewards.shape == (3, 4) and maps.shape == (3, 4, 4, 4)
    assert torch.allclose(maps.mean((2, 3)), torch.ones(3, 4), atol=1e-5) and (maps >= 0).all()
    assert torch.allclose(stage.score(scorer, images, vqa, (4, 4), maps=False)[0], rewards, atol=1e-5)

    tokenizer, vlm = scorer.processor.tokenizer, scorer.model
    vlm.set_attn_implementation("eager")
    for i, (question, answer) in enumerate(vqa):
        content = [{"type": "image"}, {"type": "text", "text": question + " Answer in one word."}]
        text = scorer.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        spelt = ["two", "Two", "2"] if answer == "two" else ["yes", "Yes"]
        ids = {tokenizer(sp + s, add_special_tokens=False).input_ids[0] for s in spelt for sp in ("", " ")} - {
            tokenizer.unk_token_id
        }
        for n in range(3):
            picture = (images[n] * 255).round().to(torch.uint8)
            x = scorer.processor(text=[text + answer.capitalize()], images=[picture], return_tensors="pt")
            with torch.no_grad():
                out = vlm(**x, output_attentions=True)
            p = out.logits[0, -2].softmax(-1)[list(ids)].sum()
            assert abs(p - rewards[n, i]) < 1e-5
            here = (x["input_ids"][0] == vlm.config.image_token_id).nonzero()[:, 0]
            m = torch.stack([out.attentions[layer][0, :, -1, here] for layer in (0, 1)]).mean((0, 1)).view(4, 4)
            assert torch.allclose(m / m.mean(), maps[n, i], atol=1e-4)


def test_the_saved_lora_is_loaded_by_diffusers_alone(pipe, tmp_path):
    """alpha != r, so that a lost alpha shows; the output changes and equals the trainer's."""
    stage3, stage4 = (common.load_stage(ROOT / f) for f in ("03_score_atoms.py", "04_train_cast.py"))
    sys.argv = ["04", "--run", str(tmp_path), "--rank", "4", "--alpha", "16"]
    args = stage4.parse(stage3)
    trained = common.load_pipeline(args.model, "cpu", torch.float32)
    params = stage4.add_lora(trained.transformer, args)
    assert common.lora_digest(trained.transformer) == "base"
    torch.manual_seed(0)
    for name, p in params.items():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    stage4.save_lora(trained, tmp_path / "lora")
    fresh = common.load_pipeline(args.model, "cpu", torch.float32)
    fresh.load_lora_weights(tmp_path / "lora")
    assert common.lora_digest(fresh.transformer) == common.lora_digest(trained.transformer) != "base"

    embeds = common.encode_prompts(pipe, ["a red circle"], max_sequence_length=8, text_encoder_layers=[1, 2, 3])
    x = common.start_noise(pipe, (4, 4), [0])
    with torch.no_grad():
        base, ours, theirs = (
            common.velocity_fn(p, embeds, (4, 4), 4.0)(x, torch.tensor(0.7)) for p in (pipe, trained, fresh)
        )
    assert (ours - theirs).abs().max() < 1e-5 and (ours - base).abs().max() > 1e-3


# ---------------------------------------------------------------- the pipeline


def test_all_stages_in_order_and_a_second_start_skips_the_work(tmp_path):
    """Small settings; each artifact has what DESIGN 2 promises."""
    stages = [
        ("01_find_window.py", "--num-prompts", "8"),
        ("02_build_csg.py", "--sample", "12"),
        ("03_score_atoms.py", "--groups", "4", "--samples", "4", "--batch-groups", "2"),
        ("04_train_cast.py", "--groups", "4", "--samples", "4", "--batch-groups", "2", "--rounds", "2"),
        ("05_eval.py", "--num-prompts", "6", "--images-per-prompt", "1"),
    ]
    for script, *argv in stages:
        run(script, "--run", tmp_path, *argv)
    window = json.loads((tmp_path / "window.json").read_text())
    assert window["window"][0] == 0 and 0 < window["window"][1] == window["knee_step"] < window["steps"] == 10
    assert len(window["sigmas"]) == 11 and window["sigmas"][-1] == 0

    shard, metadata = common.read_tensors(tmp_path / "shards" / "round_0000" / "00000.safetensors")
    k, w = len(json.loads(metadata["atoms"])), window["knee_step"]
    shapes = {
        "latents": (4, w + 1, 16, 16),
        "log_probs": (4, w, 16),
        "x0": (4, 16, 16),
        "rewards": (4, k),
        "maps": (4, k, 4, 4),
        "seeds": (4,),
    }
    assert {n: tuple(t.shape) for n, t in shard.items()} == shapes and shard["latents"].dtype == torch.float32
    assert len(set(shard["seeds"].tolist())) == 4 and metadata["lora"] == "base"

    metrics = common.read_jsonl(tmp_path / "metrics.jsonl")
    assert [m["round"] for m in metrics] == [0, 1] and all(
        m["ratio_minus_1"] <= 1e-6 and m["grad_norm"] > 0 for m in metrics
    )
    weights = load_file(tmp_path / "lora" / "round_0002" / "pytorch_lora_weights.safetensors")
    assert all(v.any() for v in weights.values()), "every LoRA matrix got a gradient"
    scores = json.loads((tmp_path / "eval" / "scores.json").read_text())
    assert {"base", "lora", "delta"} <= set(scores)
    for name in ("window.png", "maps.png", "training.png", "eval/report.html"):
        assert (tmp_path / name).stat().st_size > 5000

    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    for script, *argv in stages:
        start = time.monotonic()
        run(script, "--run", tmp_path, *argv)
        assert time.monotonic() - start < 10
    assert {p: t for p, t in stamps.items() if p.stat().st_mtime_ns != t} == {}


def test_all_pictures_of_a_round_have_their_own_seed(atoms_run):
    """Also where a round has a prompt twice, since there are fewer prompts than groups."""
    lines = (atoms_run / "atoms.jsonl").read_text().splitlines(keepends=True)
    (atoms_run / "atoms.jsonl").write_text("".join(lines[:3]))
    run("03_score_atoms.py", "--run", atoms_run, *SMALL)
    shards = [common.read_tensors(p)[0] for p in sorted((atoms_run / "shards" / "round_0000").glob("*.safetensors"))]
    assert len(shards) == 4 and len({s for shard in shards for s in shard["seeds"].tolist()}) == 16
    assert len({tuple(x.flatten().tolist()) for shard in shards for x in shard["x0"]}) == 16
    starts = [shard["latents"][:, 0] for shard in shards]
    assert all(torch.equal(x, x[:1].expand_as(x)) for x in starts), "--same-noise: a group starts from one noise"


def lora_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "state" / "state.safetensors")


def test_a_killed_run_continues_in_the_same_bits(atoms_run, tmp_path_factory):
    """6 rounds straight against SIGKILL in round 3 and a restart (DESIGN 2; field_reports T9)."""
    killed = tmp_path_factory.mktemp("killed")
    (killed / "atoms.jsonl").write_bytes((atoms_run / "atoms.jsonl").read_bytes())
    argv = [*SMALL, "--rounds", "6", "--updates", "2"]
    command = [sys.executable, str(ROOT / "04_train_cast.py"), *argv, "--run"]
    straight = subprocess.Popen([*command, str(atoms_run)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    victim = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shard = killed / "shards" / "round_0003" / "00000.safetensors"
    deadline = time.monotonic() + 120
    while not shard.exists() and victim.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    _, stderr = straight.communicate(timeout=200)
    assert straight.returncode == 0, stderr.decode()
    assert shard.exists() and not (killed / "lora" / "round_0006").exists(), "killed in round 3"
    subprocess.run([*command, str(killed)], check=True, capture_output=True)

    a, b = lora_of(atoms_run), lora_of(killed)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    drop = ("seconds",)
    lines = [
        [{k: v for k, v in m.items() if k not in drop} for m in common.read_jsonl(r / "metrics.jsonl")]
        for r in (atoms_run, killed)
    ]
    assert lines[0] == lines[1] and [m["round"] for m in lines[0]] == list(range(6))
    name = (
        "lora/round_0006/pytorch_lora_weights.safetensors"  # the order of a file's metadata may differ, its content not
    )
    (a, made), (b, made_too) = common.read_tensors(atoms_run / name), common.read_tensors(killed / name)
    assert made == made_too and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not [p for p in killed.rglob("*") if p.name.startswith(".")], "no temporary file is left"


def test_the_ratio_check_trips_on_rounded_latents(atoms_run):
    """Latents stored in bf16 are not what the rollout used: the ratio before the update is off 1, and that is refused."""
    run("03_score_atoms.py", "--run", atoms_run, *SMALL)
    for path in (atoms_run / "shards" / "round_0000").glob("*.safetensors"):
        tensors, metadata = common.read_tensors(path)
        tensors["latents"] = tensors["latents"].bfloat16().float()
        save_file(tensors, path, metadata)
    assert "the ratio is off 1 by" in fails("04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "1")
    assert not (atoms_run / "state" / "state.safetensors").exists() and not (atoms_run / "lora").exists()


def test_a_scorer_of_ones_own_is_one_flag(atoms_run):
    """README, "Swap a stage": a file that takes stage 03's names and replaces `score`."""
    own = atoms_run / "own_scorer.py"
    own.write_text(
        "import torch\nimport common\n"
        "stage = common.load_stage(common.ROOT / '03_score_atoms.py')\n"
        "add_rollout_arguments, load_window, round_rows, collect = ("
        "stage.add_rollout_arguments, stage.load_window, stage.round_rows, stage.collect)\n"
        "def load_scorer(*args):\n    return None\n"
        "def score(scorer, images, vqa_list, grid, maps=True):\n"
        "    n, k = len(images), len(vqa_list)\n"
        "    return images.mean((1, 2, 3))[:, None].expand(n, k), torch.ones(n, k, *grid)\n"
    )
    run("04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "1", "--scorer", own, "--std-floor", "1e-4")
    assert 0.5 < common.read_jsonl(atoms_run / "metrics.jsonl")[0]["reward"] < 1


# ---------------------------------------------------------------- what goes wrong


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, atoms_run):
    empty = tmp_path / "empty"
    assert "atoms.jsonl: cannot be read" in fails("03_score_atoms.py", "--run", empty)
    assert "atoms.jsonl: cannot be read" in fails("04_train_cast.py", "--run", empty)
    assert not empty.exists(), "nothing is written"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    good = (atoms_run / "atoms.jsonl").read_text()
    (fresh / "atoms.jsonl").write_text(good)
    assert "run 01_find_window.py first" in fails("04_train_cast.py", "--run", fresh)
    for window in (["0", "10"], ["3", "3"], ["-1", "2"], ["5", "11"]):
        assert "--window" in fails("04_train_cast.py", "--run", fresh, "--window", *window)
    for argv, message in [
        (["--updates", "3"], "--updates 3"), (["--samples", "1"], "--samples 1"), (["--rounds", "0"], "--rounds 0"),
        (["--model", str(tmp_path / "no")], "--model"), (["--vlm", str(tmp_path / "no")], "--vlm"), (["--height", "33"], "--height 33"),
        (["--map-layers", "9"], "--map-layers 9"), (["--map-floor", "2"], "--map-floor"), (["--scorer", "no.py"], "no.py"),
    ]:  # fmt: skip
        assert message in fails("04_train_cast.py", "--run", fresh, *SMALL, *argv)
    first, *others = good.splitlines()
    for text, message in [
        (f"{first}\n{{broken\n", "atoms.jsonl:2: not JSON"), ("", "is empty"), (f"{first}\n[1]\n", "atoms.jsonl:2: must be a JSON object"),
        ('{"prompt": "a"}\n', "atoms.jsonl:1: needs prompt, vqa_list"), ('{"prompt": "a", "vqa_list": [], "skills": []}\n', "atoms.jsonl:1"),
        ('{"prompt": "a", "vqa_list": [["q"]], "skills": ["count"]}\n', "[question, answer]"), (f"{first}\n{first}\n", "same id"),
    ]:  # fmt: skip
        (fresh / "atoms.jsonl").write_text(text)
        assert message in fails("04_train_cast.py", "--run", fresh, *SMALL)
    assert sorted(p.name for p in fresh.iterdir()) == ["atoms.jsonl"], "nothing half written"


@pytest.mark.parametrize(
    "flags",
    [
        "--height 0", "--steps 1", "--groups 0", "--samples 0", "--batch-groups 0", "--vlm-batch -2", "--rank 0", "--alpha 0",
        "--lr nan", "--lr inf", "--lr -1", "--weight-decay nan", "--noise-level 0", "--noise-level nan", "--clip-range -1",
        "--max-grad-norm nan", "--max-ratio-gap nan", "--std-floor -1", "--save-every 0", "--keep-rounds -2", "--warmup -2",
        "--map-floor 2", "--seed 9999999999999999999999", "--seed -1", "--max-sequence-length 0", "--text-encoder-layers 99 1 2",
        "--text-encoder-layers 1", "--lora-targets foo", "--lora-targets (", "--device foo", "--map-layers 7",
    ],
)  # fmt: skip
def test_no_number_out_of_range_is_taken(atoms_run, flags):
    before = sorted(atoms_run.iterdir())
    assert flags.split()[0] in fails("04_train_cast.py", "--run", atoms_run, *SMALL, *flags.split())
    assert sorted(atoms_run.iterdir()) == before, "nothing is written"


def test_flags_are_not_abbreviated(atoms_run):
    """An abbreviated --scorer or --preset would be read by one parser and not by the other."""
    for flags in (["--score", "x.py"], ["--pres", "tiny"], ["--round", "3"]):
        run("04_train_cast.py", "--run", atoms_run, *SMALL, *flags, expect=2)


OWN = """
import math, sys, torch, common
stage = common.load_stage(common.ROOT / '03_score_atoms.py')
add_rollout_arguments, load_window, round_rows, collect = (
    stage.add_rollout_arguments, stage.load_window, stage.round_rows, stage.collect)
def load_scorer(*args):
    return None
def score(scorer, images, vqa_list, grid, maps=True):
    n, k = len(images), len(vqa_list)
    rewards, maps = torch.rand(n, k, generator=torch.Generator().manual_seed(0)), torch.ones(n, k, *grid)
"""


@pytest.mark.parametrize(
    "body, message",
    [
        ("    return None", "rewards NoneType"), ("    return rewards[:, 0], maps", "rewards torch.float32 [4]"),
        ("    return rewards, maps[:, :1]", "maps"), ("    return rewards, None", "maps NoneType"),
        ("    return rewards.long(), maps", "rewards torch.int64"), ("    return rewards * math.nan, maps", "no reward of"),
        ("    return rewards, -maps", "not negative"), ("    return rewards, maps * math.nan", "finite"),
        ("    return rewards, maps * 2", "mean 1"), ("    return (", "cannot be loaded: SyntaxError"),
        ("    return rewards, maps\ndel collect", "has no collect"), ("    return rewards, maps\nimport nothing_like_it", "ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_a_broken_scorer_is_one_line(atoms_run, body, message):
    (atoms_run / "own.py").write_text(OWN + body + "\n")
    assert message in fails(
        "04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "1", "--scorer", atoms_run / "own.py"
    )
    assert not (atoms_run / "shards").exists() and not (atoms_run / "metrics.jsonl").exists()


def test_an_edited_scorer_is_another_scorer(atoms_run):
    own = atoms_run / "own.py"
    own.write_text(OWN + "    return rewards, maps\n")
    command = ["04_train_cast.py", "--run", atoms_run, *SMALL, "--scorer", own, "--rounds"]
    run(*command, "1")
    own.write_text(OWN + "    return 1 - rewards, maps\n")
    assert "was made with --scorer own.py" in fails(*command, "2")
    (atoms_run / "state" / "state.safetensors").unlink()
    assert "its scorer is own.py" in fails(*command, "2")


def test_a_scorer_as_in_the_readme_judges_in_05(tmp_path):
    text = (ROOT / "README.md").read_text()
    code = text[text.index("    import torch\n    import common\n") : text.index("## Settings: the paper")]
    (tmp_path / "my_scorer.py").write_text(textwrap.dedent(code))
    (tmp_path / "run").mkdir()
    run(
        "05_eval.py",
        "--run",
        tmp_path / "run",
        "--scorer",
        tmp_path / "my_scorer.py",
        "--lora",
        "none",
        "--num-prompts",
        "3",
    )
    assert 50 < json.loads((tmp_path / "run" / "eval" / "scores.json").read_text())["base"]["soft_tifa.am"] < 100


def test_a_run_goes_on_in_a_moved_clone(atoms_run, tmp_path_factory, monkeypatch):
    """The same files elsewhere: stages started from another folder, then from a copy of the repository."""
    command = ["04_train_cast.py", "--run", str(atoms_run), *SMALL, "--rounds"]
    monkeypatch.chdir(atoms_run)  # a preset's paths are now absolute
    run(*command, "1")
    moved = tmp_path_factory.mktemp("moved") / "repository"
    moved.mkdir()
    for name in ("common.py", "03_score_atoms.py", "04_train_cast.py"):
        shutil.copy(ROOT / name, moved)
    (moved / "tests").symlink_to(ROOT / "tests")
    again = subprocess.run(
        [sys.executable, str(moved / command[0]), *command[1:], "2"], capture_output=True, text=True, cwd=moved
    )
    assert again.returncode == 0, again.stderr
    assert [m["round"] for m in common.read_jsonl(atoms_run / "metrics.jsonl")] == [0, 1]


def test_some_nan_rewards_are_masked_and_counted(atoms_run):
    (atoms_run / "own.py").write_text(OWN + "    rewards[1, 0] = math.nan\n    return rewards, maps\n")
    run("04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "1", "--scorer", atoms_run / "own.py")
    line = common.read_jsonl(atoms_run / "metrics.jsonl")[0]
    assert line["nan_rewards"] == 4 and 0 < line["reward"] < 1 and line["grad_norm"] > 0


@pytest.mark.parametrize("text", ["[]", "null", "5", "{}", '{"model": "M", "steps": 10}', "{",
                                  '{"model": "M", "steps": 10, "window": [0]}', '{"model": "M", "steps": 10, "window": ["0", "3"]}'])  # fmt: skip
def test_a_broken_window_file_is_one_line(atoms_run, text):
    (atoms_run / "window.json").write_text(text.replace('"M"', json.dumps(str(MODELS / "flux2"))))
    assert "window.json" in fails("04_train_cast.py", "--run", atoms_run, *SMALL[:-3])


def test_changed_prompts_states_and_shards_are_refused(atoms_run):
    command = ["04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds"]
    run(*command, "1")
    state, good = atoms_run / "state" / "state.safetensors", (atoms_run / "atoms.jsonl").read_text()
    (atoms_run / "atoms.jsonl").write_text("".join(good.splitlines(keepends=True)[::-1]))
    assert "was made with --atoms" in fails(*command, "2")
    (atoms_run / "atoms.jsonl").write_text(good)
    whole = state.read_bytes()
    tensors, metadata = common.read_tensors(state)
    first = next(k for k in tensors if k.startswith("param."))
    for broken, made in (
        ({**tensors, first: tensors[first][:1]}, metadata),
        (tensors, {}),
        ({first: tensors[first]}, metadata),
    ):
        save_file(broken, state, made)
        assert "state.safetensors" in fails(*command, "2")
    state.write_bytes(whole)
    shard = atoms_run / "shards" / "round_0001" / "00000.safetensors"
    run(*command, "2")
    state.write_bytes(whole)  # as if killed before the state of round 1 was written
    tensors, metadata = common.read_tensors(shard)
    for name in ("maps", "rewards", "latents"):
        save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, shard, metadata)
        assert f"its {name} must be of shape" in fails(*command, "2")


def test_a_second_process_on_one_run_is_refused(atoms_run):
    with common.only_process(atoms_run):
        assert "another process trains it" in fails("04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "1")
    stale = atoms_run / "shards" / ".00000.safetensors.abc.partial"
    stale.parent.mkdir()
    stale.write_bytes(b"half")
    with common.only_process(atoms_run):
        assert not stale.exists(), "what a killed process left is removed"


def test_foreign_artifacts_are_refused(atoms_run):
    run("03_score_atoms.py", "--run", atoms_run, *SMALL)
    assert "was made with --seed 0, not 1" in fails("03_score_atoms.py", "--run", atoms_run, *SMALL, "--seed", "1")
    (atoms_run / "shards" / "round_0000" / "settings.json").unlink()
    assert "its seed is 0, not 1" in fails("03_score_atoms.py", "--run", atoms_run, *SMALL, "--seed", "1")
    run("04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "1")
    assert "was made with --lr 0.002, not 0.01" in fails(
        "04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "2", "--lr", "0.01"
    )
    shard = atoms_run / "shards" / "round_0001" / "00000.safetensors"
    shard.parent.mkdir()
    shard.write_bytes(b"cut off")
    assert f"{shard}: is not a whole safetensors file" in fails(
        "04_train_cast.py", "--run", atoms_run, *SMALL, "--rounds", "2"
    )
    (atoms_run / "window.json").write_text(json.dumps({"model": "another", "steps": 10, "window": [0, 3]}))
    assert "window.json: was found with --model another" in fails("03_score_atoms.py", "--run", atoms_run, *SMALL[:-3])


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs /proc, which root cannot write to either"
)
def test_an_unwritable_run_folder_is_one_line():
    assert "cannot be written" in fails("02_build_csg.py", "--run", "/proc/self/nowhere", "--sample", "3")
