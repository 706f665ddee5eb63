"""The tiny world's CLIP: a CLIPModel that tells whether a 32x32 picture is what a prompt says.

    python tests/tiny/train_clip.py --out tests/tiny/models --work /tmp/tiny       about 4 min on one core

Contrastive, on renders with light noise and their prompts. Half of a batch are the other half's prompts with some
attributes, counts or sides changed (world.mislabel), with pictures of their own: the hard negatives.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

sys.path.insert(0, str(Path(__file__).parent))
import world  # noqa: E402
from fit import fit  # noqa: E402


def build_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-pair tokenizer with merges that make every word of the prompts one token."""
    prompts = [*world.COUNTS, *world.COLOURS, *world.SIDES, "and", *(s + p for s in world.SHAPES for p in ("", "s"))]
    words = sorted(
        {w for p in prompts for w in p.split()}, key=lambda w: (-len(w), w)
    )  # long first: no clash of merges
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens, merges = dict.fromkeys([*letters, *(c + "</w>" for c in letters)]), {}
    for word in words:
        pieces = [*word[:-1], word[-1] + "</w>"]
        for i in range(1, len(pieces)):
            merges[("".join(pieces[:i]), pieces[i])] = None
            tokens["".join(pieces[: i + 1])] = None
    tokens |= dict.fromkeys(["<|startoftext|>", "<|endoftext|>"])
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=list(merges), model_max_length=77)
    assert all(len(tokenizer.tokenize(w)) == 1 for w in words)
    return tokenizer


def build_processor() -> CLIPProcessor:
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return CLIPProcessor(image_processor=image_processor, tokenizer=build_tokenizer())


def build_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    """Pooling takes the eos token's place, so the toy ids must be in the configuration."""
    eos = tokenizer.eos_token_id
    tower = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, projection_dim=32)
    torch.manual_seed(4)
    return CLIPModel(
        CLIPConfig(
            text_config=dict(
                vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=77,
                bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=eos, **tower,
            ),
            vision_config=dict(num_hidden_layers=3, image_size=32, patch_size=8, **tower),
            projection_dim=32,
        )
    )  # fmt: skip


def embed(
    clip: CLIPModel, processor: CLIPProcessor, prompts: list[str], pictures: np.ndarray
) -> tuple[torch.Tensor, ...]:
    """Unit vectors [N, 32] of prompts and of pictures [N, 32, 32, 3] in 0..1."""
    text = processor.tokenizer(prompts, padding=True, return_tensors="pt")
    mean, std = (torch.tensor(getattr(processor.image_processor, k)) for k in ("image_mean", "image_std"))
    pixels = ((torch.from_numpy(pictures) - mean) / std).movedim(-1, 1).float()
    t = clip.get_text_features(**text).pooler_output
    i = clip.get_image_features(pixel_values=pixels).pooler_output
    return F.normalize(t, dim=-1), F.normalize(i, dim=-1)


def draw(rng: random.Random, n: int, noise: float) -> tuple[list[str], np.ndarray]:
    """n training prompts, each second one a changed copy of the one before, and a picture of each."""
    scenes = [world.random_scene(rng) for _ in range(n // 2)]
    for i in range(n // 2):
        while True:
            changed = world.mislabel(scenes[i], rng, 0.3, 0.1)
            if changed != scenes[i] and not world.is_held_out(changed):
                break
        scenes.append(changed)
    noises = np.random.default_rng(rng.randrange(2**32))
    pictures = world.render(np.stack([world.lay_out(s, rng) for s in scenes]), noises)
    pictures += noise * noises.random((n, 1, 1, 1)) * noises.standard_normal(pictures.shape)
    return [str(s) for s in scenes], pictures.clip(0, 1).astype(np.float32)


def train_clip(args: argparse.Namespace) -> tuple[CLIPModel, CLIPProcessor]:
    """Trains and saves model and processor in out/clip. Uses args.clip_steps, work, out. Resumed from args.work."""
    processor = build_processor()
    clip = build_model(processor.tokenizer)

    def loss_fn(step: int) -> tuple[torch.Tensor, dict]:
        prompts, pictures = draw(random.Random(f"clip {step}"), 128, 0.08)
        t, i = embed(clip, processor, prompts, pictures)
        logits, own = clip.logit_scale.exp().clamp(max=100) * t @ i.T, torch.arange(len(t))
        loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        return loss, {"top1": (logits.argmax(1) == own).float().mean().item()}

    fit("clip", clip, loss_fn, steps=args.clip_steps, lr=1e-3, work=args.work)
    clip.save_pretrained(args.out / "clip")
    processor.save_pretrained(args.out / "clip")
    return clip, processor


@torch.no_grad()
def evaluate_clip(clip: CLIPModel, processor: CLIPProcessor, batches: int = 20) -> dict[str, float]:
    """Retrieval in batches of 64 different prompts, of training pairs (new pictures) and of held-out pairs, and the share
    of held-out prompts that are nearer to their own picture than to one of a prompt with something changed.
    Held-out batches are hard: 64 of 360 prompts on 36 pairs; "A and B" is also true of the pictures of "A under B"."""
    rng, table = random.Random(5), {}

    def similarities(scenes: list[world.Scene], shown: list[world.Scene]) -> torch.Tensor:
        pictures = world.render(
            np.stack([world.lay_out(s, rng) for s in shown]), np.random.default_rng(rng.randrange(2**32))
        )
        t, i = embed(clip, processor, [str(s) for s in scenes], pictures)
        return t @ i.T

    own = torch.arange(64)
    for _ in range(batches):
        new = list({str(s): s for s in (world.random_scene(rng) for _ in range(96))}.values())[:64]
        held_out = rng.sample(world.held_out_prompts(), 64)
        for name, scenes in (("new", new), ("held_out", held_out)):
            s = similarities(scenes, scenes)
            table.setdefault(f"{name} text to image", []).extend((s.argmax(1) == own).tolist())
            table.setdefault(f"{name} image to text", []).extend((s.argmax(0) == own).tolist())
        changed = [world.mislabel(s, rng, 0.35, 0.0) for s in held_out]
        s = similarities(held_out, held_out + changed)
        wins = s[own, own] > s[own, own + 64]
        kept = [bool(w) for w, a, b in zip(wins, held_out, changed, strict=True) if a != b]
        table.setdefault("held_out beats changed", []).extend(kept)
    return {k: round(float(np.mean(v)), 4) for k, v in table.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models", help="folder of the models")
    parser.add_argument("--work", type=Path, required=True, help="folder of the training states")
    parser.add_argument("--clip-steps", type=int, default=1800)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    table = evaluate_clip(*train_clip(args))
    print(json.dumps(table))


if __name__ == "__main__":
    main()
