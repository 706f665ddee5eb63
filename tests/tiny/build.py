"""Builds the tiny world's models from nothing: a FLUX.2 pipeline, a Qwen3-VL, a CLIP. `make tiny` runs it.

    python tests/tiny/build.py --work runs/tiny            about an hour; prints the accuracy table of README.md

Each training stage keeps its state in --work and is resumed from there. The denoiser is trained on true captions, then
on captions of which each count, colour and side is drawn anew with probability --mislabel (shapes with a third of it):
that is the base, and that is the fault that RL has to mend. The control goes on with true captions.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
import world  # noqa: E402
from fit import fit  # noqa: E402
from train_clip import evaluate_clip, train_clip  # noqa: E402
from train_vlm import evaluate_vlm, train_vlm  # noqa: E402

TEXT_LENGTH = 8  # "three red circles to the left of two blue squares" is 7 tokens: a side is one token
TEXT_WIDTH = 64
TEXT_LAYERS = (1, 2, 3)
STEPS = 10


# ---------------------------------------------------------------- the FLUX.2 pipeline


def words() -> list[str]:
    nouns = [s + p for s in world.SHAPES for p in ("", "s")]
    return [*world.COUNTS, *world.COLOURS, *nouns, *world.SIDES, "and"]


def text_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token (a side is one word). Its chat template keeps the user's text and drops the system message."""
    vocab = {w: i for i, w in enumerate(["<pad>", "<unk>", *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*world.SIDES, "[a-z]+"])), "removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    fast.model_max_length = TEXT_LENGTH
    fast.chat_template = (
        "{% for m in messages if m['role'] == 'user' %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    return fast


def text_encoder(vocab_size: int) -> Mistral3ForConditionalGeneration:
    config = Mistral3Config(
        text_config=dict(
            model_type="mistral", vocab_size=vocab_size, hidden_size=TEXT_WIDTH, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=64, sliding_window=None,
            rope_parameters=dict(rope_type="default", rope_theta=100.0), pad_token_id=0, bos_token_id=1, eos_token_id=1,
        ),
        vision_config=dict(
            model_type="pixtral", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, intermediate_size=16,
            image_size=32, patch_size=8, rope_parameters=dict(rope_type="axial", rope_theta=1e4),
        ),
        image_token_index=1, spatial_merge_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(config).eval()
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return model


def train_text_encoder(
    model: Mistral3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> None:
    """Stands for a language model's pretraining: linear heads read from each noun its group's count, colour and shape,
    and from the last noun the side and the first group too. The heads are dropped, the encoder is frozen."""
    sizes = (3, 3, 3, 5, 3, 3, 3)  # own count, colour, shape; side or "and"; the first group's count, colour, shape
    torch.manual_seed(4)
    heads = torch.nn.Linear(TEXT_WIDTH, sum(sizes))
    nouns = torch.tensor([i for w, i in tokenizer.get_vocab().items() if w.rstrip("s") in world.SHAPES])
    text = model.model.language_model

    def loss_fn(step: int) -> tuple[torch.Tensor, dict]:
        rng = random.Random(f"text {step}")
        scenes = [world.random_scene(rng) for _ in range(128)]
        x = tokenizer([str(s) for s in scenes], padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt")
        h = text(input_ids=x.input_ids, attention_mask=x.attention_mask).last_hidden_state
        row, place = torch.isin(x.input_ids, nouns).nonzero(as_tuple=True)  # the nouns, group by group
        want = []
        for scene in scenes:
            for i, g in enumerate(scene.groups):
                first = scene.groups[0]
                above = [4 if scene.side is None else scene.side, first.count - 1, first.colour, first.shape]
                want.append([g.count - 1, g.colour, g.shape] + (above if i == 1 else [-100] * 4))
        losses = [
            torch.nn.functional.cross_entropy(logits, target)
            for logits, target in zip(heads(h[row, place]).split(sizes, 1), torch.tensor(want).T, strict=True)
        ]
        return sum(losses), {}

    fit(
        "text",
        torch.nn.ModuleList([text, heads]),
        loss_fn,
        steps=args.text_steps,
        lr=2e-3,
        work=args.work,
        ema_decay=0.99,
    )
    model.requires_grad_(False)


def autoencoder() -> AutoencoderKLFlux2:
    torch.manual_seed(1)
    return AutoencoderKLFlux2(
        block_out_channels=(16, 32, 32), down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=32, mid_block_add_attention=False,
    )  # fmt: skip


def denoiser() -> Flux2Transformer2DModel:
    torch.manual_seed(2)
    return Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=24, num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH * len(TEXT_LAYERS), timestep_guidance_channels=64, mlp_ratio=2.0,
        axes_dims_rope=(4, 8, 8, 4), rope_theta=100, guidance_embeds=True,
    )  # fmt: skip


def to_tensor(pictures: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pictures).movedim(-1, -3) * 2 - 1


def train_autoencoder(vae: AutoencoderKLFlux2, args: argparse.Namespace) -> None:
    """Squared error; the decoder sees latents with noise, so that it forgives the denoiser's small errors."""

    def loss_fn(step: int) -> tuple[torch.Tensor, dict]:
        rng, generator = random.Random(step), torch.Generator().manual_seed(step)
        cells = np.stack([world.lay_out(world.random_scene(rng), rng) for _ in range(16)])
        x = to_tensor(world.render(cells, np.random.default_rng(step)))
        z = vae.encode(x).latent_dist.mode()
        noise = torch.randn(z.shape, generator=generator) * 0.1 * torch.rand(len(z), 1, 1, 1, generator=generator)
        y = vae.decode(z + noise).sample
        mse = (y - x).square().mean()
        return mse + 1e-3 * (z.square().mean() - 1).square(), {"rms": mse.item() ** 0.5}

    fit("vae", vae, loss_fn, steps=args.vae_steps, lr=3e-3, work=args.work, ema_decay=0.99)


@torch.no_grad()
def encode_pool(vae: AutoencoderKLFlux2, n: int, seed: int) -> tuple[list[world.Scene], torch.Tensor]:
    """n scenes with their latents as the transformer sees them: [n, 16 tokens, 16 channels], normalised. Sets vae.bn."""
    rng = random.Random(seed)
    scenes = [world.random_scene(rng) for _ in range(n)]
    pictures = world.render(np.stack([world.lay_out(s, rng) for s in scenes]), np.random.default_rng(seed))
    z = torch.cat([vae.encode(x).latent_dist.mode() for x in to_tensor(pictures).split(256)])
    z = Flux2Pipeline._patchify_latents(z)
    if not hasattr(vae, "measured"):
        vae.bn.running_mean.copy_(z.mean((0, 2, 3)))
        vae.bn.running_var.copy_(z.var((0, 2, 3)))
        vae.measured = True
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
    return scenes, Flux2Pipeline._pack_latents((z - mean) / std)


def train_denoiser(pipe: Flux2Pipeline, name: str, steps: int, mislabel: float, args: argparse.Namespace) -> None:
    """Flow matching, sigma = sigmoid(N(0.4, 1)); captions as world.mislabel makes them."""
    tr, scenes, latents = pipe.transformer, *args.pool
    embeds: dict[str, torch.Tensor] = {}

    def embed(prompts: list[str]) -> torch.Tensor:
        if new := sorted(set(prompts) - embeds.keys()):
            with torch.no_grad():
                e, _ = pipe.encode_prompt(new, max_sequence_length=TEXT_LENGTH, text_encoder_out_layers=TEXT_LAYERS)
            embeds.update(zip(new, e, strict=True))
        return torch.stack([embeds[p] for p in prompts])

    img_ids = Flux2Pipeline._prepare_latent_ids(torch.empty(1, 16, world.GRID, world.GRID))
    txt_ids = Flux2Pipeline._prepare_text_ids(torch.empty(1, TEXT_LENGTH, 1))

    def loss_fn(step: int) -> tuple[torch.Tensor, dict]:
        rng, generator = random.Random(f"{name} {step}"), torch.Generator().manual_seed(step)
        picked = [rng.randrange(len(scenes)) for _ in range(args.batch)]
        captions = [str(world.mislabel(scenes[i], rng, mislabel, mislabel / 3)) for i in picked]
        x0 = latents[picked]
        sigma = torch.sigmoid(0.4 + torch.randn(len(x0), generator=generator))
        eps = torch.randn(x0.shape, generator=generator)
        x = torch.lerp(x0, eps, sigma[:, None, None])
        v = tr(
            hidden_states=x, timestep=sigma, guidance=torch.full((len(x),), 4.0), encoder_hidden_states=embed(captions),
            txt_ids=txt_ids, img_ids=img_ids, return_dict=False,
        )[0]  # fmt: skip
        return (v - (eps - x0)).square().mean(), {}

    fit(name, tr, loss_fn, steps=steps, lr=args.lr, work=args.work)


# ---------------------------------------------------------------- judging


@torch.no_grad()
def generate(pipe: Flux2Pipeline, prompts: list[str], seed: int, batch: int = 128) -> np.ndarray:
    """Pictures [n, 32, 32, 3] in 0..1 by the pipeline's own call (the default sampler of the tiny preset)."""
    out = []
    for i in range(0, len(prompts), batch):
        result = pipe(
            prompt=prompts[i : i + batch], height=32, width=32, num_inference_steps=STEPS, guidance_scale=4.0, output_type="np",
            max_sequence_length=TEXT_LENGTH, text_encoder_out_layers=TEXT_LAYERS,
            generator=[torch.Generator().manual_seed(seed * 1_000_000 + i + j) for j in range(len(prompts[i : i + batch]))],
        )  # fmt: skip
        out.append(result.images)
    return np.concatenate(out)


def accuracy(pictures: np.ndarray, scenes: list[world.Scene]) -> dict[str, float]:
    """Oracle: share of right atoms by kind, of pictures with all atoms right, and of readable pictures."""
    kinds: dict[str, list[bool]] = {"object": [], "count": [], "attribute": [], "relation": [], "atom": [], "all": []}
    for picture, scene in zip(pictures, scenes, strict=True):
        vqa = world.questions(scene)
        right = world.judge(picture, vqa)
        for (q, _), ok in zip(vqa, right, strict=True):
            kind = (
                "count"
                if q.startswith("How")
                else "object"
                if "any" in q
                else "relation"
                if " the " in q[8:]
                else "attribute"
            )
            kinds[kind].append(ok)
        kinds["atom"] += right
        kinds["all"].append(all(right))
    kinds["readable"] = [world.readable(p) for p in pictures]
    return {k: round(float(np.mean(v)), 4) for k, v in kinds.items() if v}


def write_prompts(path: Path, scenes: list[world.Scene]) -> None:
    """The held-out prompts as GenEval 2 writes its own, shuffled, so that the first n are a fair sample."""
    lines = []
    for scene in random.Random(0).sample(scenes, len(scenes)):
        vqa, group = world.questions(scene), ["count", "attribute", "object"]
        skills = group + ["position"] * (scene.side is not None) + group
        atom_count = len(vqa) - sum(answer == "one" for _, answer in vqa)
        lines.append({"prompt": str(scene), "atom_count": atom_count, "vqa_list": vqa, "skills": skills})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def print_table(table: dict) -> None:
    """The accuracy table of the three models."""
    columns = ("object", "count", "attribute", "relation", "atom", "all", "readable")
    print("oracle on pictures of the held-out prompts" + " " * 7 + "".join(f"{c:>10}" for c in columns))
    titles = {"control": "true captions (control)", "base": "wrong captions (the base)"}
    for name, title in titles.items():
        print(f"  denoiser, {title:37}" + "".join(f"{table[name][c]:10.3f}" for c in columns))
    vlm = table["vlm"]
    print(f"VLM on the base's pictures, {vlm['readable']} of {vlm['pictures']} readable")
    for title, key in (
        ("agreement with the oracle, balanced answers", "balanced"),
        ("agreement on the prompt's atoms", "own"),
    ):
        value = "accuracy" if key == "balanced" else "agreement"
        print(f"  {title:47}" + "".join(f"{vlm[key][c][value]:10.3f}" for c in columns[:4]))
    for value in ("ece", "unsaturated"):
        print(f"  {value:47}" + "".join(f"{vlm['own'][c][value]:10.3f}" for c in columns[:4]))
    for row in ("lift", "selectivity"):
        for layer in range(3):
            values = [vlm["maps"][f"{layer} {c}"].get(row) for c in columns[:4]]
            print(
                f"  {row} of maps, layer {layer}".ljust(49)
                + "".join("         -" if v is None else f"{v:10.2f}" for v in values)
            )
    print("CLIP", json.dumps(table["clip"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models", help="folder of the models")
    parser.add_argument("--work", type=Path, required=True, help="folder of the training states")
    parser.add_argument(
        "--mislabel", type=float, default=0.15, help="probability that an attribute of a caption is drawn anew (0.15)"
    )
    parser.add_argument("--text-steps", type=int, default=1500)
    parser.add_argument("--vae-steps", type=int, default=2500)
    parser.add_argument("--clean-steps", type=int, default=9000)
    parser.add_argument("--control-steps", type=int, default=8000)
    parser.add_argument("--base-steps", type=int, default=2500)
    parser.add_argument("--vlm-steps", type=int, default=2000)
    parser.add_argument("--clip-steps", type=int, default=1800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--pool", type=int, default=60_000, help="pictures that the denoiser is trained on (60000)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    tokenizer = text_tokenizer()
    pipe = Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5), vae=autoencoder(), text_encoder=text_encoder(len(tokenizer)),
        tokenizer=tokenizer, transformer=denoiser(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    train_text_encoder(pipe.text_encoder, tokenizer, args)
    train_autoencoder(pipe.vae, args)
    args.pool = encode_pool(pipe.vae, args.pool, seed=3)
    held_out = world.held_out_prompts()
    write_prompts(args.out.parent / "heldout.jsonl", held_out)
    table = {}
    # "clean" goes on in two ways: on true captions as the control, and on wrong ones as the base.
    for name, steps, p in (
        ("clean", args.clean_steps, 0.0), ("control", args.control_steps, 0.0), ("clean", args.clean_steps, 0.0),
        ("base", args.base_steps, args.mislabel),
    ):  # fmt: skip
        train_denoiser(pipe, name, steps, p, args)  # a finished one is only loaded
        table[name] = accuracy(generate(pipe, [str(s) for s in held_out], seed=1), held_out)
        print(name, json.dumps(table[name]), flush=True)
    pipe.save_pretrained(args.out / "flux2")
    table["vlm"] = evaluate_vlm(train_vlm(args), generate(pipe, [str(s) for s in held_out], seed=12), held_out)
    table["clip"] = evaluate_clip(*train_clip(args))
    (args.out / "accuracy.json").write_text(json.dumps(table, indent=1) + "\n")
    print_table(table)


if __name__ == "__main__":
    main()
