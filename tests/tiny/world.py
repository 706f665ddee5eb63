"""The tiny world: pictures of coloured shapes, prompts in GenEval 2's form, and an oracle that reads pictures.

A picture is 32x32 pixels, a grid of 4x4 cells of 8x8 pixels. An object fills one cell and jitters by one
pixel in it, so one latent token of the tiny FLUX.2 is one cell. A prompt names one group of objects
("two red circles") or two groups of different shapes, joined by "and" or by a side ("to the left of": every
object of the first group lies strictly on that side of every object of the second).

`judge(picture, vqa_list)` is the oracle: nearest prototype per cell. It shares nothing with the VLM that gives
the reward. A cell that fits no prototype makes the picture unreadable, and all its atoms count as wrong.
"""

import itertools
import random
import re
from dataclasses import dataclass

import numpy as np

GRID, CELL = 4, 8
COLOURS = {"red": (0.86, 0.16, 0.16), "green": (0.13, 0.62, 0.24), "blue": (0.15, 0.33, 0.86)}
SHAPES = ("circle", "square", "triangle")
COUNTS = ("a", "two", "three")
SIDES = ("to the left of", "to the right of", "on top of", "under")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BACKGROUND = 0.94
EMPTY, UNREADABLE = -1, -2
MAX_RESIDUAL = (
    0.11  # RMS over a cell; renders decode to 0.02, noise of 0.05 gives 0.05, half-mixed colours 0.10 to 0.18
)
MAX_RIVAL = 0.8  # residual over that of the best prototype of another colour: 1 for half-mixed colours, noise gives 0.2


# ---------------------------------------------------------------- pictures


def _prototypes() -> np.ndarray:
    """All cells: [shape, colour, jitter 3x3, 8, 8, 3], anti-aliased by 8x8 samples a pixel."""
    s = (np.arange(CELL * 8) + 0.5) / 8
    out = np.empty((len(SHAPES), len(COLOURS), 9, CELL, CELL, 3), np.float32)
    for j, (dy, dx) in enumerate(itertools.product((-1, 0, 1), repeat=2)):
        y, x = np.meshgrid(s - CELL / 2 - dy, s - CELL / 2 - dx, indexing="ij")
        inside = (
            x**2 + y**2 < 2.9**2,
            np.maximum(abs(x), abs(y)) < 2.5,
            (y < 2.7) & (abs(x) < (y + 3.0) * 0.56),
        )
        for i, mask in enumerate(inside):
            alpha = mask.reshape(CELL, 8, CELL, 8).mean((1, 3))[..., None]
            for c, colour in enumerate(COLOURS.values()):
                out[i, c, j] = alpha * np.array(colour) + (1 - alpha) * BACKGROUND
    return out


PROTOTYPES = _prototypes()


def render(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """cells [..., 4, 4] of shape*3+colour or EMPTY -> pictures [..., 32, 32, 3] in 0..1."""
    kinds = np.concatenate([PROTOTYPES.reshape(9, 9, CELL, CELL, 3), np.full((1, 9, CELL, CELL, 3), BACKGROUND)])
    tiles = kinds[cells, rng.integers(0, 9, cells.shape)]  # EMPTY = -1 picks the last kind
    return np.moveaxis(tiles, -4, -3).reshape(*cells.shape[:-2], GRID * CELL, GRID * CELL, 3).astype(np.float32)


def read(pictures: np.ndarray) -> np.ndarray:
    """Pictures [..., 32, 32, 3] in 0..1 -> cells [..., 4, 4]: shape*3+colour, EMPTY or UNREADABLE."""
    pictures = np.asarray(pictures, np.float32)
    tiles = pictures.reshape(*pictures.shape[:-3], GRID, CELL, GRID, CELL, 3)
    tiles = np.moveaxis(tiles, -3, -4).reshape(*pictures.shape[:-3], GRID, GRID, -1)
    table = np.concatenate([PROTOTYPES.reshape(81, -1), np.full((1, CELL * CELL * 3), BACKGROUND, np.float32)])
    mse = ((tiles**2).mean(-1)[..., None] - 2 / tiles.shape[-1] * tiles @ table.T + (table**2).mean(-1)).clip(0)
    best, residual = mse.argmin(-1), np.sqrt(mse.min(-1))
    colours = np.sort(np.sqrt(mse[..., :81].reshape(*mse.shape[:-1], 3, 3, 9).min((-3, -1))), -1)  # best of each colour
    mixed = (best < 81) & (colours[..., 0] > MAX_RIVAL * colours[..., 1])
    return np.where((residual > MAX_RESIDUAL) | mixed, UNREADABLE, np.where(best == 81, EMPTY, best // 9))


# ---------------------------------------------------------------- scenes and prompts


@dataclass(frozen=True)
class Group:
    count: int  # 1..3
    colour: int
    shape: int

    def __str__(self) -> str:
        noun = SHAPES[self.shape] + ("s" if self.count > 1 else "")
        return f"{COUNTS[self.count - 1]} {list(COLOURS)[self.colour]} {noun}"


@dataclass(frozen=True)
class Scene:
    groups: tuple[Group, ...]
    side: int | None = None  # index into SIDES, or None for "and" and for one group

    def __str__(self) -> str:
        joint = " and " if self.side is None else f" {SIDES[self.side]} "
        return joint.join(map(str, self.groups))


ALL_GROUPS = [Group(*g) for g in itertools.product((1, 2, 3), range(3), range(3))]
ALL_PAIRS = [(a, b) for a, b in itertools.combinations(ALL_GROUPS, 2) if a.shape != b.shape]
HELD_OUT = frozenset(random.Random(20).sample(ALL_PAIRS, 36))  # pairs that no training picture shows


def is_held_out(scene: Scene) -> bool:
    return scene.groups in HELD_OUT or scene.groups[::-1] in HELD_OUT


def held_out_prompts() -> list[Scene]:
    """All 360 prompts on the held-out pairs: both orders, "and" and four sides."""
    pairs = sorted(HELD_OUT, key=str)
    return [Scene(p, s) for pair in pairs for p in (pair, pair[::-1]) for s in (None, 0, 1, 2, 3)]


def random_scene(rng: random.Random, p_single: float = 0.2, p_side: float = 0.7) -> Scene:
    """A training scene: never a held-out pair."""
    if rng.random() < p_single:
        return Scene((rng.choice(ALL_GROUPS),))
    while True:
        a, b = rng.choice(ALL_GROUPS), rng.choice(ALL_GROUPS)
        scene = Scene((a, b), rng.randrange(4) if rng.random() < p_side else None)
        if a.shape != b.shape and not is_held_out(scene):
            return scene


def lay_out(scene: Scene, rng: random.Random) -> np.ndarray:
    """Cells [4, 4] of a picture in which every atom of the scene is true: each group stands in a quarter of its own."""
    quarters = [(y, x) for y in (0, 1) for x in (0, 1)]
    axis = 0 if scene.side is not None and scene.side >= 2 else 1
    while True:
        chosen = rng.sample(quarters, len(scene.groups))
        if scene.side is None or chosen[scene.side % 2][axis] < chosen[1 - scene.side % 2][axis]:
            break
    cells = np.full((GRID, GRID), EMPTY)
    for group, (y, x) in zip(scene.groups, chosen, strict=True):
        for i in rng.sample(range(4), group.count):
            cells[2 * y + i // 2, 2 * x + i % 2] = group.shape * 3 + group.colour
    return cells


def mislabel(scene: Scene, rng: random.Random, p: float, p_shape: float) -> Scene:
    """A caption that is wrong as real captions are: each count, colour and side drawn anew with probability p,
    each shape with p_shape (the shapes of a prompt stay different)."""
    groups = []
    for g in scene.groups:
        count = rng.randint(1, 3) if rng.random() < p else g.count
        colour = rng.randrange(3) if rng.random() < p else g.colour
        shape = rng.randrange(3) if rng.random() < p_shape else g.shape
        groups.append(Group(count, colour, shape))
    if len(groups) == 2 and groups[0].shape == groups[1].shape:
        groups = [Group(n.count, n.colour, o.shape) for n, o in zip(groups, scene.groups, strict=True)]
    side = rng.randrange(4) if scene.side is not None and rng.random() < p else scene.side
    return Scene(tuple(groups), side)


# ---------------------------------------------------------------- the oracle

_SHAPE = f"({'|'.join(SHAPES)})s?"
_COUNT = re.compile(f"How many {_SHAPE} are in the image\\?")
_OBJECT = re.compile(f"Are there any {_SHAPE} in the image\\?")
_COLOUR = re.compile(f"(?:Is|Are) the {_SHAPE} ({'|'.join(COLOURS)})\\?")
_SIDE = re.compile(f"(?:Is|Are) the {_SHAPE} ({'|'.join(SIDES)}) the {_SHAPE}\\?")


def answer(cells: np.ndarray, question: str) -> str:
    """The right answer for readable cells [4, 4]: a number word, "Yes" or "No". Raises ValueError on another question."""
    places = {s: np.argwhere(cells // 3 == i) for i, s in enumerate(SHAPES)}  # EMPTY // 3 == -1
    colours = list(COLOURS)
    if m := _COUNT.fullmatch(question):
        n = len(places[m[1]])
        return WORDS[n] if n < len(WORDS) else str(n)
    if m := _OBJECT.fullmatch(question):
        true = len(places[m[1]]) > 0
    elif m := _COLOUR.fullmatch(question):
        own = [cells[tuple(p)] % 3 for p in places[m[1]]]
        true = bool(own) and all(c == colours.index(m[2]) for c in own)
    elif m := _SIDE.fullmatch(question):
        a, b, side = places[m[1]], places[m[3]], SIDES.index(m[2])
        axis = 0 if side >= 2 else 1
        if side in (1, 3):
            a, b = b, a
        true = len(a) > 0 and len(b) > 0 and a[:, axis].max() < b[:, axis].min()
    else:
        raise ValueError(f"the oracle does not know the question {question!r}")
    return "Yes" if true else "No"


def judge(picture: np.ndarray, vqa_list: list[list[str]]) -> list[bool]:
    """One picture [32, 32, 3] in 0..1 and its [[question, answer]] -> whether each atom is right.
    A picture with an unreadable cell has no right atom."""
    cells = read(picture)
    if (cells == UNREADABLE).any():
        return [False] * len(vqa_list)
    return [answer(cells, q).lower() == a.lower() for q, a in vqa_list]


def readable(picture: np.ndarray) -> bool:
    return bool((read(picture) != UNREADABLE).all())


def asked_cells(cells: np.ndarray, question: str) -> tuple[np.ndarray, np.ndarray]:
    """Masks [4, 4] of the cells with objects that the question is about, and of the cells with other objects."""
    asked = np.zeros(cells.shape, bool)
    for s in re.findall(_SHAPE, question):
        asked |= cells // 3 == SHAPES.index(s)
    return asked, (cells >= 0) & ~asked


def questions(scene: Scene) -> list[list[str]]:
    """[[question, answer]] in GenEval 2's order and wording, for training and for tests of stage 02."""
    out = []
    for i, g in enumerate(scene.groups):
        noun = SHAPES[g.shape]
        the = f"Are the {noun}s" if g.count > 1 else f"Is the {noun}"
        out.append([f"How many {noun}s are in the image?", WORDS[g.count]])
        out.append([f"{the} {list(COLOURS)[g.colour]}?", "Yes"])
        out.append([f"Are there any {noun}s in the image?", "Yes"])
        if i == 0 and scene.side is not None:
            other = scene.groups[1]
            plural = "s" if other.count > 1 else ""
            out.append([f"{the} {SIDES[scene.side]} the {SHAPES[other.shape]}{plural}?", "Yes"])
    return out
