"""PickScore and figure 2: the score against CLIPModel's own forward, agreement by hand, and a run on the tiny CLIP."""

import hashlib
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

import common

ps = common.load_stage(ROOT / "variants" / "05_pickscore.py")
SCRIPT, CLIP = "variants/05_pickscore.py", ROOT / "tests" / "tiny" / "models" / "clip"
HELD_OUT = ROOT / "tests" / "tiny" / "heldout.jsonl"
needs_clip = pytest.mark.skipif(not CLIP.is_dir(), reason="tests/tiny/models has not been built")


def row(prompt: int, model: str, image: int, pickscore: float, gm: float) -> dict:
    return {"row": prompt, "model": model, "image": image, "pickscore": pickscore, "gm": gm}


def test_agreement_by_hand():
    rows = [
        row(0, "a", 0, 20.0, 0.5), row(0, "a", 1, 21.0, 0.9), row(0, "b", 0, 22.0, 0.7),  # aa agrees; ab agrees, disagrees
        row(1, "b", 0, 20.0, 0.5), row(1, "a", 0, 19.0, 0.5), row(1, "b", 1, 21.0, 0.2),  # ab equal, ab disagrees; bb disagrees
        row(2, "a", 0, 20.0, 0.1), row(2, "b", 0, 20.0, 0.9),  # ab equal in PickScore
        row(3, "a", 0, 30.0, 0.9),  # alone: no pair
    ]  # fmt: skip
    got = {k: (v["share"], v["pairs"], v["equal"], v["prompts"]) for k, v in ps.agreement(rows).items()}
    assert got == {"all": (0.4, 5, 2, 2), "a": (1.0, 1, 0, 1), "a, b": (0.3333, 3, 2, 2), "b": (0.0, 1, 0, 1)}
    assert ps.agreement(rows)["a"]["low"] is None, "one prompt gives no interval"
    assert ps.agreement(rows) == ps.agreement(rows[::-1]), "the order of the pictures does not matter"


def test_equal_scores_and_opposite_scores():
    scores = np.random.default_rng(0).random((50, 4))
    rows = [row(p, "a", i, v, v) for p, line in enumerate(scores) for i, v in enumerate(line)]
    assert ps.agreement(rows)["all"] == dict(share=1.0, low=1.0, high=1.0, pairs=300, equal=0, prompts=50)
    assert ps.agreement([r | {"gm": -r["gm"]} for r in rows])["all"]["share"] == 0
    flat = ps.agreement([r | {"gm": 0.5} for r in rows])["all"]
    assert flat["share"] is None and flat["equal"] == 300 and flat["pairs"] == 0


def test_the_interval_is_over_prompts_not_pairs():
    """Scores without relation, 40 prompts of 4 pictures: an interval over the 240 pairs as if they were independent would
    be too narrow. 95% intervals of 200 draws must hold 50% in 90 to 99% of them (true 93%: odds under 1e-3 to fail)."""
    rng, hits, old = np.random.default_rng(0), 0, ps.RESAMPLES
    ps.RESAMPLES = 500
    try:
        for seed in range(200):
            effect = rng.random(40) < 0.5  # a prompt's pairs all agree, or all disagree
            rows = [
                row(p, "a", i, float(i), float(i if effect[p] else -i))
                for p, i in itertools.product(range(40), range(4))
            ]
            found = ps.agreement(rows, seed)["all"]
            hits += found["low"] <= 0.5 <= found["high"]
    finally:
        ps.RESAMPLES = old
    assert 0.90 <= hits / 200 <= 0.99, hits


def test_distributions_are_pooled_and_by_model():
    rows = [row(i, m, 0, 20.0 + i + (m == "b"), i / 10) for i in range(5) for m in "ab"]
    got = ps.distributions(rows)
    assert [*got] == ["all", "a", "b"] and got["all"]["pickscore"]["n"] == 10
    assert got["b"]["pickscore"]["p50"] == 23 and got["a"]["gm"]["mean"] == pytest.approx(0.2)
    assert got["a"]["pickscore"]["std"] == pytest.approx(np.std(range(5), ddof=1), abs=1e-4)


@needs_clip
def test_the_score_is_clip_s_own_logit(tmp_path):
    """logits_per_image of CLIPModel's forward, a picture and a prompt at a time, whatever the batch and its padding."""
    model, processor = CLIPModel.from_pretrained(CLIP).eval(), CLIPProcessor.from_pretrained(CLIP)
    rng, prompts = np.random.default_rng(0), ["a red circle", "three blue squares to the left of two green triangles"]
    pictures = [Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)) for _ in prompts]
    got = ps.pickscore((model, processor), pictures, prompts)
    for picture, prompt, score in zip(pictures, prompts, got, strict=True):
        with torch.no_grad():
            want = model(**processor(text=[prompt], images=picture, return_tensors="pt")).logits_per_image
        assert score == pytest.approx(want.item(), abs=1e-4)
    assert ps.pickscore((model, processor), pictures[:1], ["a " * 200]), "a long prompt is cut, not an error"


def judged_run(run, n=4) -> None:
    """What 05_eval.py leaves: pictures, per_image.jsonl, settings.json."""
    digest, lines = hashlib.sha256(HELD_OUT.read_bytes()).hexdigest()[:16], []
    for r, i, system in itertools.product(range(n), range(2), ("base", "lora")):
        path = run / "eval" / "images" / system / f"{r:05d}_{i:02d}.png"
        common.save_png(
            path, torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(100 * r + 10 * i + len(lines)))
        )
        made = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        lines.append(
            {"system": system, "row": r, "image": i, "scores": [0.5, 0.1 * (i + 1)], "made_with": ["vlm", made]}
        )
    common.write_text(run / "eval" / "per_image.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    common.write_json(
        run / "eval" / "settings.json", {"settings": {"eval_prompts": f"heldout.jsonl (sha256 {digest})"}}
    )


@needs_clip
def test_a_run_and_its_figure(tmp_path, run_stage, monkeypatch):
    for name in ("one", "two"):
        judged_run(tmp_path / name)
    argv = ["--run", tmp_path / "one", "--more", tmp_path / "two", "--pickscore", CLIP]
    printed = run_stage(SCRIPT, ps.main, *argv)[0]
    found = json.loads((tmp_path / "one" / "eval" / "pickscore.json").read_text())
    assert [*found["distributions"]] == ["all", "one base", "one lora", "two base", "two lora"]
    assert found["agreement"]["all"]["pairs"] + found["agreement"]["all"]["equal"] == 4 * 8 * 7 // 2
    assert (
        "agreement, one base, two lora" in printed
        and Image.open(tmp_path / "one" / "eval" / "pickscore.png").width > 500
    )
    lines = common.read_jsonl(tmp_path / "two" / "eval" / "pickscore.jsonl")
    assert len(lines) == 16 and lines[0]["gm"] == pytest.approx((0.5 * 0.1) ** 0.5)

    monkeypatch.setattr(ps, "load_clip", lambda args: pytest.fail("all is known"))
    assert run_stage(SCRIPT, ps.main, *argv)[0] == printed
    # a picture made anew since it was judged is left out until 05 has judged it
    common.save_png(tmp_path / "one" / "eval" / "images" / "base" / "00000_00.png", torch.zeros(3, 32, 32))
    run_stage(SCRIPT, ps.main, *argv)
    assert (
        json.loads((tmp_path / "one" / "eval" / "pickscore.json").read_text())["distributions"]["all"]["gm"]["n"] == 31
    )


def test_what_cannot_be_scored_is_one_clear_line(tmp_path, run_stage):
    judged_run(tmp_path / "run", 1)
    argv, other = ["--run", tmp_path / "run", "--pickscore", tmp_path / "no_clip"], tmp_path / "other.jsonl"
    other.write_text(HELD_OUT.read_text().splitlines()[0] + "\n")
    assert "was judged on heldout.jsonl" in run_stage(SCRIPT, ps.main, *argv, "--eval-prompts", other, code=2)[1]
    assert "two runs have the same name" in run_stage(SCRIPT, ps.main, *argv, "--more", tmp_path / "run", code=2)[1]
    assert "no_clip: cannot be loaded" in run_stage(SCRIPT, ps.main, *argv, code=2)[1]
    assert "settings.json: not found" in run_stage(SCRIPT, ps.main, "--run", tmp_path, code=2)[1]
    assert "--eval-prompts: name the file" in run_stage(SCRIPT, ps.main, *argv, "--preset", "flux2-dev", code=2)[1]
