"""The multi-token predictor against a twin in plain torch made of transformers' layers; it has none itself."""

import copy

import pytest
import tiny
import tiny_qwen3_5
import torch
from hand_batches import Hands
from test_mllama import load_folder, save_tensors
from test_parity import relative, rms

from tilewright.layers.batch import FeatureRun
from tilewright.models.qwen3_5.model import FAMILIES
from tilewright.ops.plan import Arena, Plan
from tilewright.types import UnsupportedConfig
from tilewright.weights.checkpoint import CheckpointError, open_checkpoint
from tilewright.weights.load import load

NAMES = ["qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next"]


class Twin(torch.nn.Module):
    """norm(embedding of the next token) and norm(hidden state) side by side, projected; an attention layer; a norm."""

    def __init__(self, text_model):
        super().__init__()
        config = copy.deepcopy(text_model.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config._attn_implementation = "eager"
        one = type(text_model)(config)
        width = config.hidden_size
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = copy.deepcopy(one.norm)
        self.pre_fc_norm_hidden = copy.deepcopy(one.norm)
        self.layers, self.norm = one.layers, one.norm
        self.rotary = [one.rotary_emb]  # in a list: it has no weights to save
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else 0.15)

    def forward(self, embeddings_TD, hidden_TD, positions):
        both = torch.cat([self.pre_fc_norm_embedding(embeddings_TD), self.pre_fc_norm_hidden(hidden_TD)], dim=-1)
        x = self.fc(both)[None]
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        turned = self.rotary[0](x, positions)
        return self.norm(self.layers[0](x, position_embeddings=turned, attention_mask=mask))[0]


def text_model_of(network):
    return getattr(network.model, "language_model", network.model)


@pytest.fixture(scope="module")
def made(networks, tmp_path_factory):
    """By family: transformers' model, the twin, and a checkpoint with both."""
    found = {}

    def of(name):
        if name not in found:
            hf, folder = networks(name)
            torch.manual_seed(7)
            twin = Twin(text_model_of(hf)).eval()
            extra = {f"mtp.{key}": tensor.clone() for key, tensor in twin.state_dict().items()}
            target = tmp_path_factory.mktemp(f"{name}_mtp")
            found[name] = hf, twin, save_tensors(target, folder, lambda tensors: tensors | extra)
        return found[name]

    return of


@torch.no_grad()
def truth_of(hf, twin, prompt, last_id):
    """(logits, hidden states) of the twin over a prompt whose next token is `last_id`."""
    seen = {}

    def keep(module, arguments, keywords, result):
        seen["inputs"], seen["hidden"] = keywords["inputs_embeds"], result.last_hidden_state[0]

    text_model = text_model_of(hf)
    embed = text_model.embed_tokens
    arguments = dict(prompt.arguments)
    if text_model is hf.model:
        arguments = {"inputs_embeds": embed(arguments["input_ids"])}
    hook = text_model.register_forward_hook(keep, with_kwargs=True)
    hf(**arguments)
    hook.remove()
    following = torch.cat([seen["inputs"][0, 1:], embed(torch.tensor([last_id]))])
    positions = torch.from_numpy(prompt.inputs.positions)
    is_next = type(hf).__name__.startswith("Qwen3Next")
    positions = positions[:1] if is_next else positions.expand(3, -1)[:, None]
    drafted = twin(following, seen["hidden"], positions)
    return hf.lm_head(drafted), drafted


def of_next_tokens(feature_runs, num_rows):
    """The runs of features one row earlier, as far as they lie within the rows."""
    runs = []
    for run in feature_runs:
        rows = run.rows_M - 1
        inside = (rows >= 0) & (rows < num_rows)
        if inside.any():
            runs.append(FeatureRun(rows[inside], run.embeddings_MD[inside]))
    return runs


def prompts_of(name, hf):
    if name in tiny_qwen3_5.SEEING:
        media = [("video", (2, 4, 6)), ("image", (1, 8, 4))]
        return [tiny.text_prompt(70, 1, num_axes=3), tiny.media_prompt(hf, media, 4)]
    return [tiny.text_prompt(90, 1), tiny.text_prompt(1, 2)]


def draft_all(model, prompt, last_id, size, dtype=torch.float32):
    """Logits of the predictor for a prompt that comes in chunks, and the hidden states behind them."""
    hands = Hands(model, dtype)
    going, parts = hands.start(prompt.inputs), []
    following = torch.tensor([*prompt.inputs.token_ids[1:], last_id])
    while going.num_left:
        begin, count = going.num_done, min(size, going.num_left)
        batch = hands.batch([(going, count)])
        _, hidden = model.forward_with_hidden(batch)
        media = of_next_tokens(hands.batch([(going, going.num_left)]).feature_runs, count)
        parts.append(model.draft(following[begin : begin + count], hidden, batch, media))
        going.num_done += count
    return tuple(torch.cat(items) for items in zip(*parts, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_states_are_the_twins(name, made):
    hf, twin, folder = made(name)
    model = load_folder(folder)
    for prompt in prompts_of(name, hf):
        wanted = truth_of(hf, twin, prompt, 17)
        for size in (1000, 1, 13):
            for ours, theirs in zip(draft_all(model, prompt, 17, size), wanted, strict=True):
                assert relative(ours, theirs) < 1e-3 and rms(ours - theirs) < 1e-4 * rms(theirs)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_bf16_is_as_close_to_the_truth_as_the_twin(name, made):
    hf, twin, folder = made(name)
    model = load_folder(folder, torch.bfloat16)
    half, half_twin = copy.deepcopy(hf).bfloat16(), copy.deepcopy(twin).bfloat16()
    ours, theirs = [], []
    for prompt in [prompts_of(name, hf)[0], tiny.text_prompt(150, 9, model.num_position_axes)]:
        truth, _ = truth_of(hf, twin, prompt, 17)
        ours.append(draft_all(model, prompt, 17, 1000, torch.bfloat16)[0] - truth)
        theirs.append(truth_of(half, half_twin, prompt, 17)[0].float() - truth)
    assert rms(torch.cat(ours)) <= 1.25 * rms(torch.cat(theirs))


@torch.inference_mode()
def test_a_second_token_is_drafted_from_the_first(made):
    """The drafted hidden state stands for the model's at the next place: the twin does the same with one row more."""
    hf, twin, folder = made("qwen3_5_text")
    model = load_folder(folder)
    prompt = tiny.text_prompt(40, 3)
    longer = tiny.text_prompt(41, 3)
    hands = Hands(model)
    going = hands.start(longer.inputs)
    batch = hands.batch([(going, 40)])
    _, hidden = model.forward_with_hidden(batch)
    following = torch.tensor(longer.inputs.token_ids[1:41])
    logits, drafted = model.draft(following, hidden, batch)
    first = logits[-1].argmax()
    going.num_done = 40
    second, _ = model.draft(first[None], drafted[-1:], hands.batch([(going, 1)]))

    _, states = truth_of(hf, twin, prompt, int(following[-1]))
    embed = hf.model.embed_tokens
    all_hidden = torch.cat([hf.model(**prompt.arguments).last_hidden_state[0], states[-1:]])
    embeddings = embed(torch.tensor([*following, first]))
    wanted = hf.lm_head(twin(embeddings, all_hidden, torch.arange(41).expand(3, 1, 41)))[-1:]
    assert relative(second, wanted) < 1e-3


@torch.inference_mode()
def test_only_the_rows_asked_for(made):
    hf, _, folder = made("qwen3_5_moe")
    model = load_folder(folder)
    inputs = prompts_of("qwen3_5_moe", hf)[0].inputs
    hands = Hands(model)
    going = hands.start(inputs)
    everything, some = hands.batch([(going, 20)]), hands.batch([(going, 20)], torch.tensor([19]))
    _, hidden = model.forward_with_hidden(everything)
    following = torch.tensor(inputs.token_ids[1:21])
    all_rows, states = model.draft(following, hidden, everything)
    last_row, last_state = model.draft(following, hidden, some)
    assert torch.equal(last_row, all_rows[19:]) and torch.equal(last_state, states[19:])


@torch.inference_mode()
def test_a_recorded_draft_is_replayed(made):
    model = load_folder(made("qwen3_5_moe")[2])
    inputs = tiny.text_prompt(30, 6, num_axes=3).inputs
    hands = Hands(model)
    going = hands.start(inputs)
    batch = hands.batch([(going, 4)])
    _, hidden = model.forward_with_hidden(batch)
    following, wanted = torch.tensor(inputs.token_ids[1:5]), []
    for ids in (following, following.flip(0)):
        wanted.append(model.draft(ids, hidden, batch)[0].clone())
    plan, given = Plan(Arena()), following.clone()
    with plan.record():
        logits, _ = model.draft(given, hidden, batch)
    assert torch.equal(logits, wanted[0])
    given.copy_(following.flip(0))
    plan.replay()
    assert torch.equal(logits, wanted[1]) and not torch.equal(wanted[0], wanted[1])


def test_it_is_there_where_the_checkpoint_has_it(made, networks, models):
    """It has one more cache of keys and values, and changes nothing about the model's own answers."""
    _, _, folder = made("qwen3_5_text")
    without, model = models("qwen3_5_text", torch.float32), load_folder(folder)
    assert without.mtp is None and model.mtp is not None
    assert model.kv_spec.num_layers == without.kv_spec.num_layers + 1
    assert model.state_spec == without.state_spec
    inputs = tiny.text_prompt(30, 1).inputs
    assert torch.equal(Hands(model).run(inputs), Hands(without).run(inputs))


def test_a_model_built_without_it_leaves_its_tensors_aside(made):
    """Whoever does not draft shows `build` no such tensors."""
    checkpoint = open_checkpoint(made("qwen3_5_text")[2])
    shown = {name: shape for name, shape in checkpoint.shapes.items() if not name.startswith("mtp.")}
    model = FAMILIES["qwen3_5_text"].build(checkpoint.config, shown)
    report = load(model, checkpoint, dtype=torch.float32, rename=model.checkpoint_name)
    assert model.mtp is None and {*report.ignored} == {*checkpoint.shapes} - {*shown}


def test_half_a_predictor_is_refused(made, tmp_path):
    _, _, folder = made("qwen3_5_text")

    def drop(tensors):
        return {key: item for key, item in tensors.items() if key != "mtp.fc.weight"}

    with pytest.raises(CheckpointError, match=r"1 tensors missing:\n  mtp.fc.weight \[96, 192\]"):
        load_folder(save_tensors(tmp_path, folder, drop))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, expected 0 or 1"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ],
)
def test_predictors_that_are_not_built(change, words):
    config = {**tiny_qwen3_5.TEXT, **tiny_qwen3_5.DENSE, **change}
    assert FAMILIES["qwen3_5_text"].build(config, {}).mtp is None  # the checkpoint has none: nothing is refused
    with pytest.raises(UnsupportedConfig, match=words):
        FAMILIES["qwen3_5_text"].build(config, {"mtp.fc.weight": (96, 192)})
