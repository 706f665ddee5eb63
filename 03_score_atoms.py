"""Stage 03: rollouts of the current policy, a reward for each atom, and a map of where each atom is.

    python 03_score_atoms.py --preset tiny --run runs/demo                                   round 0 of training
    python 03_score_atoms.py --preset flux2-dev --run runs/flux2 --lora runs/flux2/lora/round_0100 --round 100

Reads   atoms.jsonl (02), window.json (01).
Writes  shards/round_RRRR/GGGGG.safetensors, a prompt group each; maps.png, the pictures with their atoms' maps.

Reward: Soft-TIFA of GenEval 2. The frozen VLM is asked one question an atom; r_ik is the probability, at the first answer
token, of the accepted spellings of the right answer. Map: the right answer is fed (teacher-forced) and the attention from
its tokens to the image tokens, mean over heads and `--map-layers`, is resized to the latent grid and scaled to mean 1
(paper, figure 3). The paper takes separate passes for score and map. In a causal model one pass gives both: the score is
read before the answer token, the map at it.

The picture and the text before the question are read once (the VLM's key-value cache) and shared by all K questions.
"""

import argparse
import json
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

import common
from common import UserError

# images [N, 3, H, W], K [question, answer], latent grid -> rewards [N, K], maps [N, K, h, w]
ScoreFn = Callable[[torch.Tensor, Sequence[Sequence[str]], tuple[int, int]], tuple[torch.Tensor, torch.Tensor]]
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

# ---------------------------------------------------------------- the VLM: rewards and maps


@dataclass
class Scorer:
    """A frozen VLM with its processor, and the text layers whose attention makes the maps."""

    model: torch.nn.Module
    processor: object
    map_layers: list[int]
    batch: int  # pictures a pass


def load_scorer(vlm: str, device: str, dtype: torch.dtype, map_layers: Sequence[int], batch: int = 64) -> Scorer:
    try:
        model = AutoModelForImageTextToText.from_pretrained(vlm, dtype=dtype, use_safetensors=True)
        processor = AutoProcessor.from_pretrained(vlm)
    except (OSError, ValueError) as e:
        raise UserError(f"--vlm {vlm}: cannot be loaded: {str(e).splitlines()[0]}") from e
    layers = len(model.model.language_model.layers)
    if not map_layers or not all(0 <= i < layers for i in map_layers):
        raise UserError(f"--map-layers {' '.join(map(str, map_layers))}: this VLM has the layers 0 to {layers - 1}")
    return Scorer(model.to(device).eval().requires_grad_(False), processor, list(map_layers), batch)


def accepted_tokens(tokenizer, answer: str) -> list[int]:
    """Distinct first tokens of the accepted spellings (GenEval 2): the word and its capital, the digit of a number, each
    with and without a leading space."""
    word = answer.strip().lower()
    forms = [word, word.capitalize()] + ([str(NUMBERS.index(word))] if word in NUMBERS else [])
    spelt = [tokenizer(space + form, add_special_tokens=False).input_ids for form in forms for space in ("", " ")]
    ids = {s[0] for s in spelt if s and s[0] != tokenizer.unk_token_id}
    if not ids:
        raise UserError(f"answer {answer!r}: no spelling of it is in the VLM's vocabulary")
    return sorted(ids)


def split_prompt(processor, question: str) -> tuple[str, str]:
    """The chat text of one question, cut after the picture: (prefix shared by all questions, suffix)."""
    message = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": f"{question} Answer in one word."}],
    }
    text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    prefix, end, suffix = text.partition("<|vision_end|>")
    return prefix + end, suffix


@torch.no_grad()
def score(
    scorer: Scorer, images: torch.Tensor, vqa_list: Sequence[Sequence[str]], grid: tuple[int, int], maps: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Images [N, 3, H, W] in 0..1 and K [question, answer] -> rewards [N, K] in 0..1, maps [N, K, h, w] of mean 1.

    A reward is NaN where the VLM's logits are not finite; a map is uniform where its attention is not.
    """
    tokenizer, device = scorer.processor.tokenizer, scorer.model.device
    prefix = split_prompt(scorer.processor, vqa_list[0][0])[0]

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    suffixes = [tokens(split_prompt(scorer.processor, q)[1]) for q, _ in vqa_list]
    answers = [tokens(a.strip().capitalize()) for _, a in vqa_list]
    accepted = [accepted_tokens(tokenizer, a) for _, a in vqa_list]

    # The rows of all questions, padded on the right: suffix, then the teacher-forced answer.
    k, length = len(vqa_list), max(len(s) + len(a) for s, a in zip(suffixes, answers, strict=True))
    ids = torch.full((k, length), tokenizer.pad_token_id, device=device)
    mask = torch.zeros(k, length, dtype=torch.long, device=device)
    rows = torch.zeros(k, length, device=device)  # averages over a question's answer tokens
    for i, (s, a) in enumerate(zip(suffixes, answers, strict=True)):
        ids[i, : len(s) + len(a)] = torch.tensor(s + a, device=device)
        mask[i, : len(s) + len(a)] = 1
        rows[i, len(s) : len(s) + len(a)] = 1 / len(a)
    before = torch.tensor([len(s) - 1 for s in suffixes], device=device)  # the position that predicts the answer

    rewards, attention = [], []
    for part in images.split(scorer.batch):
        logits, attended = _answer(scorer, prefix, part, ids, mask, before, rows if maps else None)
        p = logits.float().softmax(-1)  # [n, K, vocabulary]
        rewards.append(torch.stack([p[:, i, accepted[i]].sum(-1) for i in range(k)], 1))
        if maps:
            attention.append(attended)
    if not maps:
        return torch.cat(rewards), None
    m = F.interpolate(torch.cat(attention), size=grid, mode="bilinear", antialias=True)
    m = m / m.mean((2, 3), keepdim=True)
    return torch.cat(rewards), torch.where(m.isfinite(), m, 1.0)


def _answer(
    scorer: Scorer, prefix: str, images: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, before: torch.Tensor,
    rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Logits before the answer [n, K, vocabulary], and with rows [K, S] the attention of those rows [n, K, h', w']."""
    vlm, n, (k, length) = scorer.model, len(images), ids.shape
    pictures = list((images * 255).round().to(torch.uint8).cpu())
    inputs = scorer.processor(text=[prefix] * n, images=pictures, return_tensors="pt").to(vlm.device)
    inputs["pixel_values"] = inputs["pixel_values"].to(vlm.dtype)
    positions, _ = vlm.model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )  # fmt: skip
    vlm.set_attn_implementation("sdpa")
    cache = vlm.model(**inputs, use_cache=True).cache
    cache.batch_repeat_interleave(k)

    kept: dict[int, torch.Tensor] = {}
    hooks = []
    if rows is not None:  # only eager attention returns its weights; keep the answer rows alone
        vlm.set_attn_implementation("eager")
        image_tokens = inputs["input_ids"][0] == vlm.config.image_token_id

        def keep(layer: int):
            def hook(module, args, output):
                if output[1] is None:
                    raise UserError("--vlm: this model returns no attention weights, so it gives no maps")
                weights = output[1].unflatten(0, (n, k))[..., : len(image_tokens)][
                    ..., image_tokens
                ]  # [n, K, heads, S, I]
                kept[layer] = torch.einsum("nkhsi,ks->nki", weights.float(), rows) / weights.shape[2]

            return hook

        attn = [vlm.model.language_model.layers[i].self_attn for i in scorer.map_layers]
        hooks = [a.register_forward_hook(keep(i)) for i, a in zip(scorer.map_layers, attn, strict=True)]
    try:
        start = positions.amax(dim=(0, 2)).repeat_interleave(k) + 1  # [n*K]
        hidden = vlm.model(
            input_ids=ids.repeat(n, 1),
            attention_mask=torch.cat([inputs["attention_mask"].repeat_interleave(k, 0), mask.repeat(n, 1)], 1),
            position_ids=(start[:, None] + torch.arange(length, device=ids.device)).expand(3, -1, -1),
            cache=cache, use_cache=True,
        ).last_hidden_state  # fmt: skip
    finally:
        for h in hooks:
            h.remove()
    logits = vlm.lm_head(hidden.unflatten(0, (n, k))[:, torch.arange(k, device=ids.device), before])
    if rows is None:
        return logits, None
    _, h, w = (inputs["image_grid_thw"][0] // torch.tensor([1, *[vlm.config.vision_config.spatial_merge_size] * 2],
                                                           device=ids.device)).tolist()  # fmt: skip
    return logits, torch.stack([kept[i] for i in scorer.map_layers]).mean(0).unflatten(-1, (h, w))


# ---------------------------------------------------------------- rollouts -> shards


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a rollout; stage 04 has the same."""
    group = parser.add_argument_group("rollout")
    group.add_argument("--model", help="diffusers pipeline: folder or hub name")
    group.add_argument("--height", type=int, metavar="PIXELS", help="height of the pictures")
    group.add_argument("--width", type=int, metavar="PIXELS", help="width of the pictures")
    group.add_argument("--steps", type=int, help="denoising steps")
    group.add_argument("--guidance", type=float, help="guidance scale, embedded in FLUX.2")
    group.add_argument("--max-sequence-length", type=int, metavar="TOKENS", help="padded length of a prompt")
    group.add_argument("--text-encoder-layers", type=int, nargs="+", metavar="LAYER", help="layers that embed a prompt")
    group.add_argument(
        "--window",
        type=int,
        nargs=2,
        metavar=("FIRST", "END"),
        help="SDE steps; unset: window.json; 0 0: none, a rollout by the ODE",
    )
    group.add_argument("--noise-level", type=float, metavar="A", help="SDE noise a; more explores wider")
    group.add_argument("--sde", choices=["flow", "dance", "cps"], default="flow", help="kind of SDE step")
    group.add_argument("--groups", type=int, default=16, metavar="P", help="prompt groups a round")
    group.add_argument("--samples", type=int, default=16, metavar="N", help="pictures a prompt group")
    same = "a group starts from one noise: its pictures differ by what the window does; no effect where the window is empty"
    group.add_argument("--same-noise", action=argparse.BooleanOptionalAction, default=True, help=same)
    group.add_argument("--batch-groups", type=int, default=8, metavar="B", help="prompt groups a forward pass")
    group = parser.add_argument_group("reward and maps")
    group.add_argument("--vlm", help="the frozen VLM: folder or hub name")
    group.add_argument("--vlm-batch", type=int, default=64, metavar="PICTURES", help="pictures a VLM pass")
    layers = "text layers whose attention, averaged, is the map"
    group.add_argument("--map-layers", type=int, nargs="+", metavar="LAYER", default=[1], help=layers)


def load_window(args: argparse.Namespace) -> tuple[int, int]:
    """--window, or stage 01's. Raises UserError if it lies outside of the steps."""
    path = args.run / "window.json"
    if args.window is None:
        if not path.exists():
            raise UserError(f"{path}: not found; run 01_find_window.py first, or give --window FIRST END")
        found = common.read_json(path)
        if not isinstance(found, dict):
            raise UserError(f"{path}: is not what 01_find_window.py writes; remove it and run that again")
        for key in ("model", "steps"):
            if str(common.portable(found.get(key))) != str(common.portable(getattr(args, key))):
                raise UserError(f"{path}: was found with --{key} {found.get(key)}, not {getattr(args, key)}")
        window, source = found.get("window"), path
    else:
        window, source = args.window, "--window"
    whole = isinstance(window, list) and len(window) == 2 and all(type(i) is int for i in window)
    if not whole or not (0 <= window[0] < window[1] < args.steps or source == "--window" and window == [0, 0]):
        raise UserError(
            f"{source}: window {window} must lie in [0, {args.steps - 1}]; the last step is never an SDE step"
        )
    return tuple(window)


def round_rows(atoms: Sequence[dict], round_: int, groups: int, seed: int) -> list[dict]:
    """The prompts of a round: a new shuffle each time that all were used."""
    picked = []
    for i in range(round_ * groups, (round_ + 1) * groups):
        epoch, place = divmod(i, len(atoms))
        generator = torch.Generator().manual_seed(common.sample_seed(seed, epoch, -1, -1))
        picked.append(atoms[int(torch.randperm(len(atoms), generator=generator)[place])])
    return picked


@torch.no_grad()
def rollout(
    pipe, embeds: torch.Tensor, seeds: Sequence[int], window: tuple[int, int], args: argparse.Namespace
) -> common.Trajectory:
    """N samples of each of B prompts, embeds [B, S, D], seeds [B*N] -> trajectory over B*N samples."""
    grid = common.latent_grid(pipe, args.height, args.width)
    same = args.same_noise and window[0] < window[1]  # without noise on the way it would be one picture N times
    starts = [seeds[j - j % args.samples] if same else s for j, s in enumerate(seeds)]
    return common.sample(
        common.velocity_fn(pipe, embeds.repeat_interleave(args.samples, 0), grid, args.guidance),
        common.start_noise(pipe, grid, starts), common.schedule(pipe, args.steps, grid[0] * grid[1]), window=window,
        noise_level=args.noise_level, kind=args.sde, generators=[torch.Generator().manual_seed(s + 1) for s in seeds],
    )  # fmt: skip


def group_seeds(rows: Sequence[dict], g: int, round_: int, args: argparse.Namespace) -> list[int]:
    """Seeds [N] of group g. A prompt that a round has again (few prompts) goes on with the next image indices."""
    first = args.samples * sum(row["id"] == rows[g]["id"] for row in rows[:g])
    return [common.sample_seed(args.seed, round_, rows[g]["id"], first + i) for i in range(args.samples)]


KEY = (
    "model vlm dtype height width steps guidance max_sequence_length text_encoder_layers noise_level sde samples same_noise "
    "map_layers seed"
).split()


def shard_metadata(
    row: dict, round_: int, window: tuple[int, int], scorer: str, policy: str, args: argparse.Namespace
) -> dict[str, str]:
    """What a shard was made from; another value makes it a shard of another run."""
    made = {k: common.portable(getattr(args, k)) for k in KEY}
    made |= {
        "scorer": scorer,
        "lora": policy,
        "round": round_,
        "window": window,
        "prompt": row["prompt"],
        "atoms": row["vqa_list"],
    }
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in made.items()}


def read_shard(path: Path, wanted: dict[str, str], window: tuple[int, int], grid: tuple[int, int]) -> dict | None:
    """The shard at `path`, None if there is none. Raises UserError if it was made from something else."""
    if not path.exists():
        return None
    tensors, found = common.read_tensors(path)
    for k, v in wanted.items():
        if found.get(k) != v:
            raise UserError(
                f"{path}: is a shard of another run: its {k} is {found.get(k)}, not {v}; use another --run or remove it"
            )
    n, k, t, tokens = int(wanted["samples"]), len(json.loads(wanted["atoms"])), window[1] - window[0], grid[0] * grid[1]
    shapes = {"latents": (n, t + 1 if t else 0, tokens), "log_probs": (n, t, tokens), "x0": (n, tokens), "rewards": (n, k),
              "maps": (n, k, *grid), "seeds": (n,)}  # fmt: skip
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape[: len(shape)]) != shape:
            raise UserError(f"{path}: its {name} must be of shape {list(shape)}; remove it to have it made again")
    return tensors


def check_score(path: Path, rewards: torch.Tensor, maps: torch.Tensor, n: int, k: int, grid: tuple[int, int]) -> None:
    """Refuses what a scorer must not return. NaN rewards are allowed, but not all of a group's."""
    for name, value, shape in (("rewards", rewards, (n, k)), ("maps", maps, (n, k, *grid))):
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"--scorer: score returned {name} {found}, not float {list(shape)}")
    if rewards.isnan().all() or rewards.isinf().any():
        raise UserError(
            f"--scorer: no reward of {path.name} is a number (dtype? a broken VLM?); the group was not written"
        )
    if (
        not maps.isfinite().all()
        or (maps < 0).any()
        or not torch.allclose(maps.mean((2, 3)), torch.ones(n, k).to(maps), atol=1e-3)
    ):
        raise UserError("--scorer: maps must be finite, not negative, and of mean 1 over the picture")


def collect(
    pipe, score_fn: ScoreFn, rows: Sequence[dict], embeds: torch.Tensor, round_: int, window: tuple[int, int], policy: str,
    args: argparse.Namespace,
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, float]]]:  # fmt: skip
    """The groups of a round in order, each as a shard's tensors and the seconds that it took; made and written if missing.

    rows: B prompts of atoms.jsonl; embeds [B, S, D]; policy: common.lora_digest. A pass holds `--batch-groups` groups and
    is made whole, so that a round that was cut off is continued in the same bits.
    """
    grid = common.latent_grid(pipe, args.height, args.width)
    folder = args.run / "shards" / f"round_{round_:04d}"
    scorer = getattr(args, "scorer", None) or common.file_id(__file__)  # in 04 it is known already
    for first in range(0, len(rows), args.batch_groups):
        some = range(first, min(first + args.batch_groups, len(rows)))
        paths = [folder / f"{g:05d}.safetensors" for g in some]
        metadata = [shard_metadata(rows[g], round_, window, scorer, policy, args) for g in some]
        shards = [read_shard(p, m, window, grid) for p, m in zip(paths, metadata, strict=True)]
        seconds = {"rollout": 0.0, "scoring": 0.0}
        if any(s is None for s in shards):
            start = time.perf_counter()
            seeds = [s for g in some for s in group_seeds(rows, g, round_, args)]
            t = rollout(pipe, embeds[some.start : some.stop], seeds, window, args)
            pictures = common.decode(pipe, t.x0, grid)
            seconds["rollout"] = time.perf_counter() - start
            for i, g in enumerate(some):
                start = time.perf_counter()
                part = slice(i * args.samples, (i + 1) * args.samples)
                scored = score_fn(pictures[part], rows[g]["vqa_list"], grid)
                rewards, maps = scored if isinstance(scored, tuple) and len(scored) == 2 else (scored, None)
                check_score(paths[i], rewards, maps, args.samples, len(rows[g]["vqa_list"]), grid)
                shards[i] = {
                    "latents": t.latents[part], "log_probs": t.log_probs[part], "x0": t.x0[part], "rewards": rewards,
                    "maps": maps, "seeds": torch.tensor(seeds[part]),
                }  # fmt: skip
                shards[i] = {k: v.cpu() for k, v in shards[i].items()}  # as a shard that is read
                if not paths[i].exists():
                    common.write_tensors(paths[i], shards[i], metadata[i])
                seconds["scoring"] += time.perf_counter() - start
        for i, shard in enumerate(shards):
            yield shard, {k: v if i == 0 else 0.0 for k, v in seconds.items()}


# ---------------------------------------------------------------- figure, main


def plot_maps(
    path: Path, pictures: torch.Tensor, rows: Sequence[dict], shards: Sequence[dict[str, torch.Tensor]]
) -> None:
    """One row a prompt: its first picture, then the picture lit where each atom's map is, with its question and score."""
    from matplotlib.figure import Figure

    width = 1 + max(len(r["vqa_list"]) for r in rows)
    figure = Figure(figsize=(1.75 * width, 2.2 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), width, squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for line, picture, row, shard in zip(axes, pictures, rows, shards, strict=True):
        image = picture.movedim(0, -1).cpu()
        line[0].imshow(image.numpy())
        line[0].set_title(textwrap.fill(row["prompt"], 26), fontsize=7.5, loc="left")
        for k, (question, wanted) in enumerate(row["vqa_list"]):
            m = F.interpolate(shard["maps"][:1, k : k + 1].float(), size=image.shape[:2], mode="nearest")[
                0, 0, ..., None
            ].cpu()
            line[k + 1].imshow((image * (0.2 + 0.8 * m / m.max())).numpy())
            reward = float(shard["rewards"][0, k])
            title = f"{textwrap.fill(question.replace(' in the image', ''), 26)}\n{wanted}: {reward:.2f}"
            line[k + 1].set_title(title, fontsize=7, color="#1a7f37" if reward >= 0.5 else "#c0262d")
    figure.suptitle(
        "Lit: where the VLM looks for an atom (attention from the right answer). Number: Soft-TIFA", fontsize=9
    )
    common.write_figure(path, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rollout_arguments(parser)
    parser.add_argument("--lora", metavar="FOLDER", help="LoRA of the policy; default: the base model")
    parser.add_argument("--round", type=int, default=0, help="number of the round: picks prompts and seeds")
    args = common.parse_args(parser)
    atoms, window = common.read_atoms(args.run / "atoms.jsonl"), load_window(args)
    rows = round_rows(atoms, args.round, args.groups, args.seed)
    folder, args.window = args.run / "shards" / f"round_{args.round:04d}", list(window)
    paths = sorted(folder.glob("[0-9]*.safetensors"))
    if common.require_same(folder / "settings.json", args) and len([common.read_tensors(p) for p in paths]) == len(
        rows
    ):
        print(f"{folder} is done: {len(rows)} groups of {args.samples}")
        return

    dtype = getattr(torch, args.dtype)
    pipe = common.load_pipeline(args.model, args.device, dtype)
    if args.lora:
        common.load_lora(pipe, args.lora)
    scorer = load_scorer(args.vlm, args.device, dtype, args.map_layers, args.vlm_batch)
    embeds = common.encode_prompts(
        pipe,
        [r["prompt"] for r in rows],
        max_sequence_length=args.max_sequence_length,
        text_encoder_layers=args.text_encoder_layers,
    )
    groups = collect(
        pipe, partial(score, scorer), rows, embeds, args.round, window, common.lora_digest(pipe.transformer), args
    )
    shards = [shard for shard, _ in tqdm(groups, total=len(rows), desc="groups", unit="group")]
    rewards = torch.stack([s["rewards"].nanmean() for s in shards])
    dead = sum(int((s["rewards"].nan_to_num().std(0) < 1e-3).sum()) for s in shards)
    print(f"{folder}: {len(rows)} groups of {args.samples}; mean atom reward {rewards.mean():.3f}; "
          f"{dead} of {sum(s['rewards'].shape[1] for s in shards)} atoms have one reward in all samples of their group")  # fmt: skip
    grid = common.latent_grid(pipe, args.height, args.width)
    first = torch.cat([s["x0"][:1] for s in shards[:6]]).to(args.device)
    plot_maps(args.run / "maps.png", common.decode(pipe, first, grid), rows[:6], shards[:6])
    common.write_settings(folder / "settings.json", args)  # last: where it is, the stage is done


if __name__ == "__main__":
    common.run_main(main)
