"""Trains the tiny world's VLM (tiny_vlm.py) to answer questions about tiny pictures.

    python tests/tiny/train_vlm.py --out tests/tiny/models --work /tmp/tiny       about 15 min on one core

It is trained on renders alone, with noise, blur, brightness and half-mixed cells: it never sees a picture of the denoiser
that it judges, nor the oracle's reading of one. By answers alone it stays at the prior. Two linear heads, dropped
afterwards, give it hints. One reads each merged vision token: the cell's object, row and column, on which sides of it
there are objects of each shape, and on which side of each shape its own group lies. One reads the text where it predicts
the answer to a relation question: which side is asked, and the subject's sides. One more term trains the attention of
text layer MAP_LAYER from the teacher-forced answer token towards the cells of the asked objects, so that this layer's maps
tell them from the others.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import world  # noqa: E402
from fit import fit  # noqa: E402
from tiny_vlm import CELLS, MAP_LAYER, Output, Trainee, answer_targets, spellings  # noqa: E402

SMOOTHING = 0.04  # of the answer, so that rewards are not saturated
KINDS = ("object", "count", "attribute", "relation")
QUESTIONS = 6  # of one picture, packed in one sequence
HINTS = {"kind": 1.0, "place": 0.2, "reach": 1.0, "side": 1.0, "subject": 0.3, "which": 0.5, "bits": 1.0}  # weights
SIDES = ("on top of", "to the left of", "under", "to the right of")  # the order of `reach` and `sides`
RELATION = re.compile(r"(?:Is|Are) the (\w+?)s? (.+) the (\w+?)s?\?")

# ---------------------------------------------------------------- pictures and questions


def random_cells(rng: random.Random) -> np.ndarray:
    """Cells [4, 4]: a prompt's picture, or a wrong one (any counts, mixed colours, absent shapes, nearly true sides)."""
    if rng.random() < 0.35:
        return world.lay_out(world.random_scene(rng), rng)
    kinds = []
    for shape in rng.sample(range(3), 3):
        own = rng.randrange(3)
        mixed = rng.random() < 0.4
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5))):
            kinds.append(shape * 3 + (rng.randrange(3) if mixed else own))
    places = rng.sample(range(CELLS), len(kinds))
    if rng.random() < 0.7:  # shape after shape along an axis: sides are true, or nearly so
        vertical = rng.random() < 0.5
        places.sort(key=lambda i: i // 4 if vertical else i % 4)
    cells = np.full(CELLS, world.EMPTY)
    cells[places] = kinds
    return cells.reshape(world.GRID, world.GRID)


def soften(cells: np.ndarray, amount: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Renders [N, 4, 4] with a picture's faults (noise, blur, brightness, cells half-way between two objects), and what
    the cells count as: the nearer a mixture is to half and half, the more random its label."""
    n = len(cells)
    other = np.where(rng.random(cells.shape) < 0.6, world.EMPTY, rng.integers(0, 9, cells.shape))
    mixed = (rng.random(cells.shape) < 0.06) & (rng.random((n, 1, 1)) < 0.6 * amount)
    weight = np.where(mixed, rng.random(cells.shape), 0.0)
    label = np.where(rng.random(cells.shape) < 1 / (1 + np.exp((0.5 - weight) / 0.07)), other, cells)
    label = np.where(mixed, label, cells)
    w = np.kron(weight, np.ones((world.CELL, world.CELL)))[..., None]
    x = (1 - w) * world.render(cells, rng) + w * world.render(other, rng)
    blur = rng.random((n, 1, 1, 1)) * 0.3 * amount
    for axis in (1, 2):
        x = (1 - blur) * x + blur / 2 * (np.roll(x, 1, axis) + np.roll(x, -1, axis))
    x = x * (1 + 0.06 * amount * rng.standard_normal((n, 1, 1, 3))) + 0.03 * amount * rng.standard_normal((n, 1, 1, 3))
    x = x + 0.1 * amount * rng.random((n, 1, 1, 1)) * rng.standard_normal(x.shape)
    return x.clip(0, 1).astype(np.float32), label


def ask(cells: np.ndarray, kind: str, rng: random.Random) -> tuple[str, str]:
    """A question of the kind and its answer; "Yes" and "No", and the counts, come as evenly as the picture allows."""
    want = rng.choice(("Yes", "Yes", "No") if kind == "relation" else ("Yes", "No"))  # a true side is often not there
    present = [i for i in range(3) if (cells // 3 == i).any()]
    for _ in range(16):
        a, b = rng.sample(range(3), 2)
        if kind in ("attribute", "relation") and present and rng.random() < 0.8:
            a = rng.choice(present)
            b = rng.choice([i for i in present if i != a] or [i for i in range(3) if i != a])
        first, second = (world.SHAPES[i] + s for i, s in zip((a, b), rng.choices(("", "s"), k=2), strict=True))
        the = f"{'Are' if first.endswith('s') else 'Is'} the {first}"
        match kind:
            case "object":
                question = f"Are there any {world.SHAPES[a]}s in the image?"
            case "count":
                question, want = f"How many {world.SHAPES[a]}s are in the image?", None
            case "attribute":
                question = f"{the} {rng.choice(list(world.COLOURS))}?"
            case "relation":
                question = f"{the} {rng.choice(world.SIDES)} the {second}?"
        answer = world.answer(cells, question)
        if want in (None, answer):
            break
    return question, answer


# ---------------------------------------------------------------- losses


def attention_loss(attention: torch.Tensor, cells: list[list[np.ndarray]]) -> torch.Tensor:
    """KL of attention [N, Q, 16], as a distribution over the image, from the uniform one over the cells [N, Q, 4, 4]."""
    where = torch.from_numpy(np.array(cells)).flatten(2).float()
    where = torch.where(where.any(-1, keepdim=True), where, 1.0)  # nothing there: uniform over the picture
    goal, given = where / where.sum(-1, keepdim=True), attention / attention.sum(-1, keepdim=True)
    return (goal * ((goal + 1e-9).log() - (given + 1e-9).log())).sum(-1).mean()


def reach(cells: np.ndarray) -> np.ndarray:
    """[N, 4, 4] -> [N, 16, 4 * 3]: is there an object of a shape in the cell's line or beyond it, on each of four sides?"""
    has = np.stack([cells // 3 == s for s in range(3)], -1)
    out = []
    for axis in (1, 2):
        line = np.broadcast_to(has.any(3 - axis, keepdims=True), has.shape)
        out += [np.maximum.accumulate(line, axis), np.flip(np.maximum.accumulate(np.flip(line, axis), axis), axis)]
    return np.concatenate(out, -1).reshape(len(cells), CELLS, 12)


def sides(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, 4, 4] -> [N, 16, 4 * 3]: do all objects of the cell's shape lie on this side (SIDES) of all objects of that one?
    And whether the cell has an object and the other shape is another one, so that there is something to tell."""
    place = np.indices((world.GRID, world.GRID)).reshape(2, 1, 1, CELLS)
    has = cells.reshape(len(cells), 1, CELLS) // 3 == np.arange(3)[:, None]  # [N, shape, 16]
    low, high = np.where(has, place, 9).min(-1), np.where(has, place, -9).max(-1)  # [axis, N, shape]
    there = has.any(-1)
    before = (high[..., None] < low[:, :, None]) & there[..., None] & there[:, None]  # [axis, N, A, B]: A before B
    table = np.concatenate([before, before.swapaxes(-1, -2)])  # [side, N, A, B]
    own = cells.reshape(len(cells), CELLS) // 3
    told = table[:, np.arange(len(cells))[:, None], own.clip(0)].transpose(1, 2, 0, 3)  # [N, 16, side, B]
    known = (own >= 0)[..., None] & (own[..., None] != np.arange(3))
    return told.reshape(len(cells), CELLS, 12), np.tile(known, 4)


def losses(
    trainee: Trainee, pictures: np.ndarray, cells: np.ndarray, rng: random.Random, auxiliary: float
) -> tuple[torch.Tensor, dict]:
    """Answers, attention of MAP_LAYER, and the hints, on QUESTIONS balanced questions of each picture."""
    kinds = [[*KINDS, *rng.choices(KINDS[1:], (2, 1, 2), k=QUESTIONS - 4)] for _ in cells]
    drawn = [[ask(c, k, rng) for k in row] for c, row in zip(cells, kinds, strict=True)]
    asked, answers = [[q for q, _ in row] for row in drawn], [[a for _, a in row] for row in drawn]
    # Stage 03 feeds the prompt's answer, right or wrong for the picture: so any answer is fed here, in any spelling.
    any_answer = {k: world.WORDS[:5] if k == "count" else ("Yes", "Yes", "No") for k in KINDS}
    fed = [[rng.choice(spellings(rng.choice(any_answer[k]))) for k in row] for row in kinds]
    out = trainee(pictures, asked, fed)

    target = answer_targets(trainee.tokenizer, answers, SMOOTHING)
    answer_loss = -(target * out.log_p).sum(-1).mean()
    end_loss = -out.log_p_after[..., trainee.tokenizer.eos_token_id].mean()
    about = [[world.asked_cells(c, q)[0] for q in row] for c, row in zip(cells, asked, strict=True)]
    terms = {"map": attention_loss(out.maps[MAP_LAYER], about)}
    terms |= cell_hints(out.cells, cells) | relation_hints(out, cells, asked)
    hints = sum(HINTS[k] * terms[k] for k in HINTS)
    loss = answer_loss + 0.02 * end_loss + 0.3 * terms["map"] + auxiliary * hints

    right = out.log_p.argmax(-1) == target.argmax(-1)
    shown = {k: right[torch.tensor([[x == k for x in row] for row in kinds])].float().mean().item() for k in KINDS}
    return loss, shown | {k: x.item() for k, x in terms.items() if k != "place"}


def cell_hints(logits: torch.Tensor, cells: np.ndarray) -> dict[str, torch.Tensor]:
    """What the vision head [N, 16, 42] says of each cell of [N, 4, 4]."""
    kind, row, column, reaches, side = logits.split((10, 4, 4, 12, 12), -1)
    line, n = torch.arange(world.GRID), len(cells)
    told, known = map(torch.from_numpy, sides(cells))
    return {
        "kind": F.cross_entropy(kind.flatten(0, 1), torch.from_numpy(cells).flatten() % 10),  # EMPTY -> 9
        "place": F.cross_entropy(row.flatten(0, 1), line.repeat_interleave(4).repeat(n))
        + F.cross_entropy(column.flatten(0, 1), line.repeat(4 * n)),
        "reach": F.binary_cross_entropy_with_logits(reaches, torch.from_numpy(reach(cells)).float()),
        "side": F.binary_cross_entropy_with_logits(side[known], told[known].float()),
    }


def relation_hints(out: Output, cells: np.ndarray, asked: list[list[str]]) -> dict[str, torch.Tensor]:
    """What the text knows where it predicts the answer: it looks at the subject alone, and of a relation question the
    text head [N, Q, 24] says which side of which shape is asked, and the subject's own row of `sides`."""
    told, known = map(torch.from_numpy, sides(cells))
    subjects, which, where, bits = [], [], [], []
    for n, row in enumerate(asked):
        relations = [RELATION.fullmatch(q) for q in row]
        subjects.append([world.asked_cells(cells[n], m[1] if m else q)[0] for q, m in zip(row, relations, strict=True)])
        for q, m in enumerate(relations):
            if m:
                where.append((n, q))
                which.append(SIDES.index(m[2]) * 3 + world.SHAPES.index(m[3]))
                bits += [(n, q, cell) for cell in np.flatnonzero(subjects[n][q])[:1]]
    (n, q), (bn, bq, cell) = torch.tensor(where).T, torch.tensor(bits).T
    use = known[bn, cell]
    return {
        "subject": attention_loss(out.maps_before[MAP_LAYER], subjects),
        "which": F.cross_entropy(out.text[n, q, :12], torch.tensor(which)),
        "bits": F.binary_cross_entropy_with_logits(out.text[bn, bq, 12:][use], told[bn, cell][use].float()),
    }


# ---------------------------------------------------------------- training and evaluation


def draw(rng: random.Random, n: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
    """n softened renders [n, 32, 32, 3] and their cells [n, 4, 4]."""
    return soften(np.stack([random_cells(rng) for _ in range(n)]), amount, np.random.default_rng(rng.randrange(2**32)))


def train_vlm(args: argparse.Namespace) -> Trainee:
    """Trains and saves model and processor in out/qwen3vl. Uses args.vlm_steps, work, out. Resumed from args.work."""
    trainee = Trainee()

    def loss_fn(step: int) -> tuple[torch.Tensor, dict]:
        rng, done = random.Random(f"vlm {step}"), step / args.vlm_steps
        pictures, cells = draw(rng, 32, min(1.0, 2 * done))  # easy first
        return losses(trainee, pictures, cells, rng, auxiliary=min(1.0, max(0.1, 2.2 - 2.4 * done)))

    fit("vlm", trainee, loss_fn, steps=args.vlm_steps, lr=2e-3, work=args.work)
    trainee.vlm.save_pretrained(args.out / "qwen3vl")
    trainee.processor.save_pretrained(args.out / "qwen3vl")
    return trainee


def kind_of(question: str) -> str:
    if question.startswith("How"):
        return "count"
    if " any " in question:
        return "object"
    return "relation" if question.count(" the ") > 1 else "attribute"


def expected_calibration_error(p: np.ndarray, true: np.ndarray, bins: int = 10) -> float:
    index = (p * bins).astype(int).clip(0, bins - 1)
    return float(sum(abs((p - true)[index == b].sum()) for b in range(bins)) / len(p))


@torch.no_grad()
def evaluate_vlm(trainee: Trainee, pictures: np.ndarray, scenes: list[world.Scene], seed: int = 0) -> dict:
    """The VLM against the oracle, on the readable ones of the pictures [N, 32, 32, 3] made for the scenes.

    balanced: two questions of each kind a picture, accuracy averaged over the answers. own: the prompt's atoms as stage
    03 asks them: agreement of p(right answer) > 1/2 with the oracle, calibration error, share of scores in (.02, .98).
    maps: for each text layer and kind, the lift (attention on the asked objects' cells over their share of the cells),
    the selectivity (attention on an asked cell over that on another object's cell), the attention mass on the image.
    """
    trainee.eval()
    cells, rng = world.read(pictures), random.Random(seed)
    keep = np.flatnonzero((cells != world.UNREADABLE).all((1, 2)))
    balanced, own, maps = [], [], []
    for some in np.array_split(keep, -(-len(keep) // 64)):
        kinds = [k for k in KINDS for _ in range(2)]
        drawn = [[ask(cells[i], k, rng) for k in kinds] for i in some]
        vqa = [world.questions(scenes[i]) for i in some]
        vqa = [row + row[:1] * (7 - len(row)) for row in vqa]  # padded; the padding is left out below
        asked = [[q for q, _ in a] + [q for q, _ in b] for a, b in zip(drawn, vqa, strict=True)]
        fed = [["Yes"] * len(a) + [spellings(x)[0] for _, x in b] for a, b in zip(drawn, vqa, strict=True)]
        result = trainee(pictures[some], asked, fed)
        log_p, attention = result.log_p, result.maps
        for n, i in enumerate(some):
            for q, (kind, (_, answer)) in enumerate(zip(kinds, drawn[n], strict=True)):
                token = trainee.tokenizer.convert_ids_to_tokens(int(log_p[n, q].argmax()))
                balanced.append((kind, answer, token.strip().lower() == answer.lower()))
            for j, (question, answer) in enumerate(world.questions(scenes[i]), start=len(kinds)):
                ids = trainee.tokenizer.convert_tokens_to_ids(spellings(answer))
                true = world.answer(cells[i], question).lower() == answer.lower()
                own.append((kind_of(question), float(log_p[n, j, ids].exp().sum()), true))
                a, b = (m.reshape(-1) for m in world.asked_cells(cells[i], question))
                if a.any():
                    for layer, raw in enumerate(attention[:, n, j].numpy()):
                        m = raw / raw.sum()
                        other = m[b].mean() if b.any() else np.nan
                        maps.append((layer, kind_of(question), m[a].sum() / a.mean(), m[a].mean(), other, raw.sum()))
    out = {"pictures": len(pictures), "readable": len(keep), "balanced": {}, "own": {}, "maps": {}}
    for kind in KINDS:
        by_answer = {}
        for k, answer, right in balanced:
            if k == kind:
                by_answer.setdefault(answer, []).append(right)
        recall = {a: round(float(np.mean(r)), 4) for a, r in sorted(by_answer.items()) if len(r) >= 10}
        out["balanced"][kind] = {"accuracy": round(float(np.mean(list(recall.values()))), 4), "by_answer": recall}
    for kind in (*KINDS, "all"):
        p, true = (np.array(x) for x in zip(*[(p, t) for k, p, t in own if kind in (k, "all")], strict=True))
        out["own"][kind] = {
            "agreement": float(((p > 0.5) == true).mean()), "oracle": float(true.mean()), "score": float(p.mean()),
            "ece": expected_calibration_error(p, true), "unsaturated": float(((p > 0.02) & (p < 0.98)).mean()),
        }  # fmt: skip
        out["own"][kind] = {k: round(v, 4) for k, v in out["own"][kind].items()}
    for layer in range(trainee.vlm.config.text_config.num_hidden_layers):
        for kind in KINDS:
            x = np.array([r[2:] for r in maps if r[:2] == (layer, kind)])
            row = {"lift": x[:, 0].mean(), "mass": x[:, 3].mean()}
            both = x[~np.isnan(x[:, 2])]
            if len(both):  # a relation asks about all objects, unless the picture has one too many
                row["selectivity"] = both[:, 1].mean() / both[:, 2].mean()
            out["maps"][f"{layer} {kind}"] = {k: round(float(v), 3) for k, v in row.items()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models", help="folder of the models")
    parser.add_argument("--work", type=Path, required=True, help="folder of the training states")
    parser.add_argument("--vlm-steps", type=int, default=2000)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    trainee, scenes = train_vlm(args), world.held_out_prompts()
    if (args.out / "flux2").exists():
        from build import generate  # here, because build.py imports this file
        from diffusers import Flux2Pipeline

        pipe = Flux2Pipeline.from_pretrained(args.out / "flux2")
        pipe.set_progress_bar_config(disable=True)
        pictures = generate(pipe, [str(s) for s in scenes], seed=12)
    else:
        print("no flux2 in --out: evaluated on renders")
        rng = random.Random(12)
        pictures = world.render(np.stack([world.lay_out(s, rng) for s in scenes]), np.random.default_rng(12))
    table = evaluate_vlm(trainee, pictures, scenes)
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
