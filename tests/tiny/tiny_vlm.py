"""The tiny world's VLM: tokenizer, processor and model of a Qwen3-VL of 0.44M parameters, and the packed forward of its
training (train_vlm.py).

A real Qwen3-VL's classes, chat template and special tokens. It differs from a real one in the vocabulary: a word is a
token, with and without its leading space, and a phrase that every question has is one token.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

sys.path.insert(0, str(Path(__file__).parent))
import world  # noqa: E402

MAP_LAYER = 1  # text layer (from 0) whose attention is the map; the question reaches the answer token in layer 0
SUFFIX = " Answer in one word."  # GenEval 2 appends it to every question
CELLS = world.GRID**2
SPECIALS = [
    f"<|{name}|>" for name in "endoftext im_start im_end vision_start vision_end vision_pad image_pad video_pad".split()
]
PREFIX = f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * CELLS}<|vision_end|>"
POSTFIX = f"{SUFFIX}<|im_end|>\n<|im_start|>assistant\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# ---------------------------------------------------------------- tokenizer, processor, model


def spellings(answer: str) -> list[str]:
    """The spellings of an answer that are single tokens of the vocabulary, the trained one ("Yes", "Two") first."""
    forms = [answer.capitalize(), answer.lower()]
    if answer.lower() in world.WORDS:
        forms.append(str(world.WORDS.index(answer.lower())))
    return [space + f for f in forms for space in ("", " ")]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words with and without a leading space are different tokens, as in Qwen's vocabulary; phrases are one token."""
    phrases = [SUFFIX, " in the image", *(f" {s}" for s in world.SIDES)]
    asked = ["How", "many", "Is", "Are", "are", "is", "there", "any", "the", *world.COLOURS]
    asked += [s + p for s in world.SHAPES for p in ("", "s")]
    words = [space + w for w in asked for space in ("", " ")]
    answers = [s for a in ("Yes", "No", *world.WORDS) for s in spellings(a)]
    others = ["<unk>", "\n", "?", ".", ",", "user", "assistant", "system"]
    tokens = dict.fromkeys([*SPECIALS, *others, *phrases, *words, *answers])
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    whole = [p.replace(".", r"\.") + r"(?![A-Za-z])" for p in phrases]
    pattern = "|".join([*whole, " ?[A-Za-z]+", " ?[0-9]+", r"\n", r"[^\sA-Za-z0-9]", " "])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIALS[1:], padding_side="left", clean_up_tokenization_spaces=False,
        model_max_length=512,
    )  # fmt: skip


def answer_targets(tokenizer: PreTrainedTokenizerFast, answers: list[list[str]], smoothing: float) -> torch.Tensor:
    """Smoothed one-hot [N, Q, V]: a little on the other of "Yes" and "No", or on the neighbouring counts."""
    out = torch.zeros(len(answers), len(answers[0]), len(tokenizer))
    for n, row in enumerate(answers):
        for q, answer in enumerate(row):
            if answer in ("Yes", "No"):
                near = ["No" if answer == "Yes" else "Yes"]
            else:
                c = world.WORDS.index(answer)
                near = [world.WORDS[i] for i in (c - 1, c + 1) if i >= 0]
            for other, share in [(answer, 1 - smoothing), *((o, smoothing / len(near)) for o in near)]:
                out[n, q, tokenizer.convert_tokens_to_ids(spellings(other)[0])] = share
    return out


def build_processor() -> Qwen3VLProcessor:
    """A Qwen3VLProcessor that keeps a 32x32 picture as it is: 8x8 patches of 4 pixels, merged to 4x4 tokens."""
    patches = dict(patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    size = {"shortest_edge": 64, "longest_edge": 32 * 32}  # pixels of area, not edges
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches), tokenizer=build_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(size=size, **patches), chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=512, initializer_range=0.06,
            rope_parameters=dict(rope_type="default", rope_theta=1e3, mrope_section=[4, 4, 4], mrope_interleaved=True),
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(
            depth=4, hidden_size=64, intermediate_size=128, num_heads=4, patch_size=4, spatial_merge_size=2,
            temporal_patch_size=2, out_hidden_size=96, num_position_embeddings=64, deepstack_visual_indexes=[], initializer_range=0.06,
        ),
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = Qwen3VLForConditionalGeneration(config)
    model.set_attn_implementation("eager")  # the maps are read, and the packed mask is a float mask
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


# ---------------------------------------------------------------- the packed forward


def to_patches(pictures: np.ndarray) -> torch.Tensor:
    """Pictures [N, 32, 32, 3] in 0..1 -> pixel_values [N * 64, 96] in the image processor's order (tested against it)."""
    x = torch.from_numpy(pictures).float().permute(0, 3, 1, 2) * 2 - 1
    x = x.view(len(x), 3, 4, 2, 4, 4, 2, 4).permute(0, 2, 5, 3, 6, 1, 4, 7)  # [N, row, column, 2, 2, 3, 4, 4]
    return x.unsqueeze(6).expand(*x.shape[:6], 2, 4, 4).reshape(-1, 96)


class Output(NamedTuple):
    """Of the packed forward; attention is the mean over heads."""

    log_p: torch.Tensor  # [N, Q, V], of the answer token
    log_p_after: torch.Tensor  # [N, Q, V], of the token after it
    maps: torch.Tensor  # [layers, N, Q, 16], attention from the answer token to the image
    maps_before: torch.Tensor  # [layers, N, Q, 16], from the token that predicts it
    cells: torch.Tensor  # [N, 16, 42], the head on the merged vision tokens
    text: torch.Tensor  # [N, Q, 24], the head on the text after MAP_LAYER, where the answer is predicted


class Trainee(torch.nn.Module):
    """The VLM, and the two auxiliary heads that are dropped after training."""

    def __init__(self, vlm: Qwen3VLForConditionalGeneration | None = None) -> None:
        super().__init__()
        self.processor = build_processor()
        self.tokenizer = self.processor.tokenizer
        self.vlm = vlm or build_model(self.tokenizer)
        self.head = torch.nn.Linear(96, 10 + 4 + 4 + 12 + 12)
        self.text_head = torch.nn.Linear(96, 12 + 12)
        prefix = self.tokenizer(PREFIX, return_tensors="pt").input_ids
        is_image = (prefix == self.vlm.config.image_token_id).int()
        grid = torch.tensor([[1, 8, 8]])
        positions, _ = self.vlm.model.get_rope_index(prefix, mm_token_type_ids=is_image, image_grid_thw=grid)
        self.prefix, self.prefix_positions, self.image = prefix, positions, is_image[0].nonzero().squeeze(1)

    def forward(self, pictures: np.ndarray, asked: list[list[str]], fed: list[list[str]]) -> Output:
        """Pictures [N, 32, 32, 3] in 0..1, Q questions and Q teacher-forced answers of each. The Q questions follow the
        picture in one sequence; a block mask hides them from each other, so that each sees what it would see alone."""
        n, q = len(pictures), len(asked[0])
        flat = self.tokenizer([s + POSTFIX for row in asked for s in row], add_special_tokens=False).input_ids
        forced = self.tokenizer.convert_tokens_to_ids([a for row in fed for a in row])
        length = max(map(len, flat)) + 1
        blocks = torch.tensor([ids + [a] + [0] * (length - 1 - len(ids)) for ids, a in zip(flat, forced, strict=True)])
        p = self.prefix.shape[1]
        ids = torch.cat([self.prefix.expand(n, p), blocks.view(n, q * length)], 1)
        start = int(self.prefix_positions.max()) + 1
        suffix = (start + torch.arange(length)).repeat(q).expand(3, 1, -1)
        positions = torch.cat([self.prefix_positions, suffix], 2).expand(3, n, -1)
        block = torch.cat([torch.full((p,), -1), torch.arange(q).repeat_interleave(length)])
        seen = (block[None] == block[:, None]) | (block[None] == -1)
        mask = torch.zeros(len(block), len(block)).masked_fill(~seen.tril(), torch.finfo(torch.float32).min)
        visual = self.vlm.model.visual(to_patches(pictures), grid_thw=torch.tensor([[1, 8, 8]] * n), return_dict=True)
        features = visual.pooler_output.view(n, CELLS, -1)
        embeds = self.vlm.get_input_embeddings()(ids)
        i = int(self.image[0])
        embeds = torch.cat([embeds[:, :i], features, embeds[:, i + CELLS :]], 1)
        out = self.vlm.model.language_model(
            inputs_embeds=embeds, position_ids=positions, attention_mask=mask[None, None].expand(n, 1, -1, -1),
            output_attentions=True, output_hidden_states=True, use_cache=False,
        )  # fmt: skip
        at = torch.tensor([len(s) for s in flat]).view(n, q) + p + torch.arange(q) * length  # the answer token's place
        rows = torch.arange(n)[:, None]
        before, after = out.last_hidden_state[rows, at - 1], out.last_hidden_state[rows, at]
        attention = torch.stack(out.attentions).mean(2)[..., i : i + CELLS]  # [layers, N, sequence, 16]
        return Output(
            log_p=self.vlm.lm_head(before).log_softmax(-1), log_p_after=self.vlm.lm_head(after).log_softmax(-1),
            maps=attention[:, rows, at], maps_before=attention[:, rows, at - 1], cells=self.head(features),
            text=self.text_head(out.hidden_states[MAP_LAYER + 1][rows, at - 1]),
        )  # fmt: skip
