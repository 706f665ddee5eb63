"""The tiny world: the oracle can be trusted, the held-out prompts are held out, the base has faults that RL can mend."""

import json
import random

import numpy as np
import pytest
import torch
import world
from build import accuracy, generate
from conftest import ROOT

MODELS = ROOT / "tests" / "tiny" / "models"


@pytest.fixture(scope="module")
def scenes() -> tuple[list[world.Scene], np.ndarray, np.ndarray]:
    """2000 scenes, their cells, their pictures."""
    rng = random.Random(1)
    drawn = [world.random_scene(rng) for _ in range(2000)]
    cells = np.stack([world.lay_out(s, rng) for s in drawn])
    return drawn, cells, world.render(cells, np.random.default_rng(1))


def test_oracle_reads_clean_and_noisy_renders(scenes):
    """At least 99.5% of atoms on clean renders, 98% under Gaussian noise of 0.05; it does as well as can be measured."""
    drawn, cells, pictures = scenes
    assert accuracy(pictures, drawn)["atom"] >= 0.995
    noise = np.random.default_rng(2).normal(0, 0.05, pictures.shape).astype(np.float32)
    assert accuracy(pictures + noise, drawn)["atom"] >= 0.98
    assert accuracy((pictures + noise).clip(0, 1), drawn)["atom"] >= 0.98
    assert (world.read(pictures) == cells).all()


def test_oracle_sees_what_is_wrong(scenes):
    """A picture of another scene has every atom right only if the scenes agree; each kind of fault is seen as such."""
    two_red_circles = world.Scene((world.Group(2, 0, 0),))
    vqa = world.questions(two_red_circles)
    cells = np.full((4, 4), world.EMPTY)
    rng = np.random.default_rng(0)

    def judged(**objects: list[tuple[int, int]]) -> list[bool]:
        here = cells.copy()
        for name, places in objects.items():
            colour, shape = name.split("_")
            for place in places:
                here[place] = world.SHAPES.index(shape) * 3 + list(world.COLOURS).index(colour)
        return world.judge(world.render(here, rng), vqa)

    assert judged(red_circle=[(0, 0), (1, 2)]) == [True, True, True]
    assert judged(red_circle=[(0, 0)]) == [False, True, True]
    assert judged(red_circle=[(0, 0), (1, 2), (3, 3)]) == [False, True, True]
    assert judged(red_circle=[(0, 0)], blue_circle=[(1, 2)]) == [True, False, True]
    assert judged(red_square=[(0, 0), (1, 2)]) == [False, False, False]
    side = world.Scene((world.Group(2, 0, 0), world.Group(1, 2, 1)), 0)
    vqa = world.questions(side)
    assert [q for q, _ in vqa][3] == "Are the circles to the left of the square?"
    assert judged(red_circle=[(0, 0), (1, 1)], blue_square=[(3, 2)])[3]
    assert not judged(red_circle=[(0, 0), (1, 2)], blue_square=[(3, 2)])[3], "a tie is not to the left"
    assert not judged(red_circle=[(0, 3), (1, 2)], blue_square=[(3, 1)])[3]


def test_garbage_has_no_right_atom(scenes):
    """Noise, flat colours, a blob over several cells, half-mixed colours, two shapes in one cell: unreadable."""
    drawn, cells, pictures = scenes
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:32, :32]
    blob = np.where(((y - 16) ** 2 + (x - 16) ** 2 < 100)[..., None], [0.86, 0.16, 0.16], world.BACKGROUND)
    p = world.PROTOTYPES
    garbage = [rng.random((32, 32, 3)), np.zeros((32, 32, 3)), np.full((32, 32, 3), [0.86, 0.16, 0.16]), blob]
    mixes = [0.5 * p[s, a, 4] + 0.5 * p[s, b, 4] for s in range(3) for a, b in ((0, 1), (0, 2), (1, 2))]
    overlays = [np.minimum(p[a, 0, 0], p[b, 2, 8]) for a in range(3) for b in range(3) if a != b]
    faint = [0.5 * p[s, c, 4] + 0.5 * world.BACKGROUND for s in range(3) for c in range(3)]
    for cell in mixes + overlays + faint:
        garbage.append(pictures[0].copy())
        garbage[-1][:8, :8] = cell
    for picture in garbage:
        assert not world.readable(picture)
        assert not any(world.judge(picture, world.questions(drawn[0])))
    blurred = pictures[:200]
    for _ in range(3):
        blurred = (blurred + np.roll(blurred, 1, 1) + np.roll(blurred, 1, 2) + np.roll(blurred, 1, (1, 2))) / 4
    assert np.mean([world.readable(b) for b in blurred]) < 0.05


def test_oracle_refuses_a_question_it_does_not_know():
    with pytest.raises(ValueError, match="does not know"):
        world.answer(np.full((4, 4), -1), "Is the circle happy?")


def test_held_out_pairs_are_in_no_training_scene(scenes):
    held_out = {frozenset(map(str, pair)) for pair in world.HELD_OUT}
    assert len(held_out) == 36
    assert not held_out & {frozenset(map(str, s.groups)) for s in scenes[0]}
    assert {frozenset(map(str, s.groups)) for s in world.held_out_prompts()} == held_out
    prompts = [json.loads(line)["prompt"] for line in (MODELS.parent / "heldout.jsonl").read_text().splitlines()]
    assert sorted(prompts) == sorted(map(str, world.held_out_prompts()))


def test_mislabel_keeps_the_rest_and_errs_as_often_as_it_says():
    """p = 0.35: a count is wrong with probability 0.35*2/3 = 0.233; 20,000 draws, 5 standard errors 0.015 (odds 6e-7)."""
    rng = random.Random(0)
    scene = world.Scene((world.Group(2, 0, 0), world.Group(1, 2, 1)), 0)
    drawn = [world.mislabel(scene, rng, 0.35, 0.0) for _ in range(20_000)]
    assert np.mean([d.groups[0].count != 2 for d in drawn]) == pytest.approx(0.233, abs=0.015)
    assert np.mean([d.groups[1].colour != 2 for d in drawn]) == pytest.approx(0.233, abs=0.015)
    assert np.mean([d.side != 0 for d in drawn]) == pytest.approx(0.35 * 0.75, abs=0.016)
    assert all([g.shape for g in d.groups] == [0, 1] for d in drawn)
    assert world.mislabel(scene, rng, 0.0, 0.0) == scene
    assert all(len({g.shape for g in world.mislabel(scene, rng, 0.5, 0.5).groups}) == 2 for _ in range(500))


def test_the_base_is_good_but_flawed():
    """Oracle on 180 held-out prompts: the shipped base lies where accuracy.json says, within 5 standard errors (odds 6e-7)."""
    from diffusers import Flux2Pipeline

    table = json.loads((MODELS / "accuracy.json").read_text())
    assert (
        0.65 <= table["base"]["atom"] <= 0.92
        and 0.15 <= table["base"]["all"] <= 0.65
        and table["control"]["all"] >= 0.85
    )
    pipe = Flux2Pipeline.from_pretrained(MODELS / "flux2", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    prompts = world.held_out_prompts()[::2]
    found = accuracy(generate(pipe, [str(s) for s in prompts], seed=9), prompts)
    for key in ("atom", "all"):
        p = table["base"][key]
        assert found[key] == pytest.approx(p, abs=5 * (p * (1 - p) / len(prompts)) ** 0.5)


def test_all_models_are_small_and_safe():
    files = [p for p in MODELS.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 20e6
    assert {p.suffix for p in files} <= {".safetensors", ".json", ".jinja", ".txt"}
