"""Options are declared once: flags, signatures, the table of the docs and the JSON for other processes follow."""

import argparse
import inspect
import json

import pytest
from sources import ROOT

import tilewright
from tilewright.diffusion.options import DiffusionOptions
from tilewright.engine.options import EngineOptions
from tilewright.flags import engine as engine_flags
from tilewright.flags.options import add_options, given_options
from tilewright.inputs.media import MediaLimits
from tilewright.options import declared, table

PAGE = ROOT / "docs" / "install.md"
GIVEN = {
    "dtype": "float32",
    "quantize": "int8",
    "mmproj": "projector.gguf",
    "device": "cuda:1",
    "backend": "torch",
    "tp": "auto",
    "cpu_binding": "0-3|4-7",
    "kv_memory": "25%",
    "kv_cache_dtype": "fp8",
    "max_context": 512,
    "max_sequences": 3,
    "max_tokens_per_step": 99,
    "speculate": 0,
    "prefix_cache": False,
    "replay": False,
    "pack_cache": False,
    "allow_special_tokens": True,
}


def parser(**defaults):
    made = argparse.ArgumentParser()
    engine_flags.add_arguments(made, **defaults)
    return made


def line(given):
    """The words of a command line that gives these options."""
    for option in declared(EngineOptions):
        if option.name in given:
            yield option.flag
            if not option.is_switch:
                yield str(given[option.name])


def test_each_option_has_its_flag():
    found = engine_flags.engine_options(parser().parse_args([*line(GIVEN)]))
    assert {**found, "model": None} == {"model": None, **GIVEN}
    assert [*GIVEN] == [option.name for option in declared(EngineOptions) if option.about.has_flag]


def test_what_is_not_given_is_left_to_the_engine():
    assert [*engine_flags.engine_options(parser().parse_args([]))] == ["model"]
    own = parser(max_sequences=1)
    assert engine_flags.engine_options(own.parse_args([]))["max_sequences"] == 1
    assert "answers computed together (default 1)" in " ".join(own.format_help().split())
    assert engine_flags.engine_options(own.parse_args(["--max-sequences", "7"]))["max_sequences"] == 7


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--tp many", "'many' is not a whole number of 1 or more"),
        ("--max-context 0", "'0' is not a whole number of 1 or more"),
        ("--speculate -1", "'-1' is not a whole number of 0 or more"),
        ("--dtype half", "invalid choice: 'half'"),
    ],
)
def test_values_that_a_flag_does_not_take(words, fault, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(words.split())
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user", "options"), [(tilewright.Engine, EngineOptions), (tilewright.Diffusion, DiffusionOptions)]
)
def test_python_knows_the_same_options(user, options):
    model, *keywords = inspect.signature(user).parameters.values()
    assert model.name == "model" and model.default is None
    defaults = vars(options())
    assert {item.name: item.default for item in keywords} == defaults
    assert all(name in user.__doc__ for name in defaults)


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"Engine has no option 'quantise'; did you mean quantize\?"):
        tilewright.Engine(quantise="int8")
    with pytest.raises(TypeError, match=r"Diffusion has no option 'low_mem'; did you mean low_memory\?"):
        tilewright.Diffusion(low_mem=True)


def test_options_of_another_s_flags_have_a_prefix():
    made = argparse.ArgumentParser()
    add_options(made, DiffusionOptions, names=("tp", "low_memory"), prefix="image")
    given = made.parse_args(["--image-tp", "2", "--image-low-memory"])
    assert vars(given) == {"image_tp": 2, "image_low_memory": True}
    assert given_options(DiffusionOptions, given, names=("tp",), prefix="image") == {"tp": 2}


def test_other_processes_get_them_as_json():
    for options in (EngineOptions(), EngineOptions(**GIVEN, media_limits=MediaLimits(max_items=3))):
        assert EngineOptions.from_json(json.loads(json.dumps(options.to_json()))) == options


@pytest.mark.parametrize("options", [EngineOptions, DiffusionOptions])
def test_the_page_has_the_table(options):
    expected = "\n".join(table(options))
    assert expected in PAGE.read_text(), f"docs/install.md has another table than this:\n{expected}"
