"""Text to samples, in voices of espeak-ng and flite: their shared libraries, called in this process.

A process for each sentence would take many times as long as the sentence. The libraries are the system's, or those in
the folder that TILEWRIGHT_SPEECH_ROOT names (carry.sh makes one). They keep state: one thread may speak.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import count
from pathlib import Path
from random import Random

import numpy as np

from training.tiny_omni.variants import SPEAKERS as SPEAKERS_FOLDER
from training.tiny_omni.variants import own_data, random_variant, write_variant

SAMPLE_RATE = 16_000
ROOT = "TILEWRIGHT_SPEECH_ROOT"

ACCENTS = (
    "en", "en-us", "en-us", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "en-us-nyc",
)  # fmt: skip
# espeak-ng's speakers, and flite's, of each set. A speaker is in one set alone, in all accents. Training has others
# besides, which are drawn at random.
SPEAKERS = {
    "training": (
        "", "m1", "m2", "m4", "m6", "m7", "m8", "f1", "f3", "f5", "Alex", "Andrea", "Andy", "Annie", "Denis", "Diogo",
        "Gene", "Henrique", "Hugo", "Jacky", "Lee", "Marco", "Mario", "Michael", "Mike", "adam", "anika", "announcer",
        "antonio", "belinda", "benjamin", "boris", "caleb", "ed", "grandma", "grandpa", "gustave", "iven", "john",
        "kaukovalta", "marcelo", "max", "michel", "miguel", "norbert", "pablo", "paul", "pedro", "quincy", "rob",
        "sandro", "shelby", "travis", "victor",
    ),
    "validation": ("m3", "f2", "david", "Alicia", "steph"),
    "test": ("m5", "f4", "edward", "linda", "robert", "zac"),
}  # fmt: skip
FLITE = {"training": ("kal16", "awb", "awb", "slt", "slt"), "validation": (), "test": ("rms",)}
# Of small factors, as the ratio of the sampling rates: then so has the length of what is transformed.
SIZES = tuple(
    Fraction(size)
    for size in ("5/6", "6/7", "8/9", "9/10", "14/15", "20/21", "21/20", "16/15", "10/9", "9/8", "7/6", "6/5")
)
# Words a minute, pitch and its range, wider in training than elsewhere.
MANNERS = {
    "training": ((100, 235), (12, 88), (12, 88)),
    "validation": ((115, 215), (25, 75), (25, 75)),
    "test": ((115, 215), (25, 75), (25, 75)),
}
# Of sentences that flite says; all but kal16 take five times as long as espeak-ng. In training it is more than their
# share of the speakers: they are few, and nothing else sounds as they do.
FLITE_SHARE = {"training": 0.25, "validation": 0.0, "test": 0.12}
VARIANT_SHARE = 0.6  # of espeak-ng's sentences in training, by speakers whom nobody hears twice

_SYNCHRONOUS, _KEEP_RUNNING = 2, 0x8000  # espeak-ng's output mode; no exit() where its data are not found
_UTF8 = 1
_RATE, _PITCH, _RANGE, _WORD_GAP = 1, 3, 4, 7  # espeak-ng's parameters
_DEPENDENCIES = ("libsonic.so.0", "libpcaudio.so.0", "libasound.so.2", "libflite.so.1", "libflite_usenglish.so.1")


class SpeechMissing(Exception):
    """A library or its data are not there."""


@dataclass(frozen=True)
class Voice:
    """Who speaks, and how."""

    engine: str  # espeak-ng or flite
    name: str  # accent+speaker, or flite's voice
    words_per_minute: int
    pitch: int  # 0 to 100
    pitch_range: int  # 0 to 100
    word_gap: int  # hundredths of a second, in espeak-ng alone
    size: Fraction = Fraction(1)  # of the speaker: above 1, all of it is lower and slower, as of somebody taller
    variant: str = ""  # espeak-ng's file of a speaker who has no name

    @property
    def speaker(self) -> str:
        """What no two sets share."""
        if self.variant:
            return f"{self.engine}/{self.variant}"
        return f"{self.engine}/{self.name.partition('+')[2] if self.engine == 'espeak-ng' else self.name}"


def random_voice(rng: Random, set_name: str) -> Voice:
    """One of the set's. In training alone sizes vary and speakers are drawn, for many more than there are."""
    size = rng.choice(SIZES) if set_name == "training" and rng.random() < 0.7 else Fraction(1)
    pace, pitch, pitch_range = (rng.randint(*ends) for ends in MANNERS[set_name])
    manner = (pace, pitch, pitch_range, rng.choice((0, 0, 1, 3, 6)))
    if FLITE[set_name] and rng.random() < FLITE_SHARE[set_name]:
        return Voice("flite", rng.choice(FLITE[set_name]), *manner, size)
    if set_name == "training" and rng.random() < VARIANT_SHARE:
        return Voice("espeak-ng", rng.choice(ACCENTS), *manner, size, random_variant(rng))
    speaker = rng.choice(SPEAKERS[set_name])
    accent = rng.choice(ACCENTS)
    return Voice("espeak-ng", f"{accent}+{speaker}" if speaker else accent, *manner, size)


def speak(text: str, voice: Voice) -> np.ndarray:
    """Mono samples, float32 of -1 to 1 at 16 kHz, without silence around them."""
    engine = _espeak() if voice.engine == "espeak-ng" else _flite()
    samples, rate = engine.speak(text, voice)
    heard = np.flatnonzero(np.abs(samples) > 0.003 * max(1, np.abs(samples).max()))
    if not len(heard):
        raise SpeechMissing(f"{voice.engine} said nothing for {text!r} in the voice {voice.name}")
    samples = samples[heard[0] : heard[-1] + 1].astype(np.float32) / 32768
    return resampled(samples, SAMPLE_RATE * voice.size / rate)


def resampled(samples: np.ndarray, ratio: Fraction) -> np.ndarray:
    """`ratio` samples for each one, by cutting or filling up the spectrum; the length is rounded."""
    if ratio == 1:
        return samples
    length = round(len(samples) * ratio)
    # Silence behind: the transform takes a sound for a loop.
    blocks = _smooth(-(-(len(samples) + 64) // ratio.denominator))
    before, after = blocks * ratio.denominator, blocks * ratio.numerator
    spectrum = np.fft.rfft(samples, before)[: after // 2 + 1]
    return (np.fft.irfft(spectrum, after)[:length] * float(ratio)).astype(np.float32)


def _smooth(least: int) -> int:
    """The next number without a factor above 5, for which transforms are fast."""
    for number in count(least):
        rest = number
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return number
    raise AssertionError("there is always one")


def is_there() -> bool:
    """Whether both engines can speak here."""
    try:
        _espeak(), _flite()
    except SpeechMissing:
        return False
    return True


def _library(name: str) -> ctypes.CDLL:
    root = os.environ.get(ROOT)
    try:
        if not root:
            return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        # By path, those that others need first: then no search path has to be set before Python starts.
        for needed in (*_DEPENDENCIES, "libflite_cmulex.so.1"):
            ctypes.CDLL(str(Path(root, "lib", needed)), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(Path(root, "lib", name)), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SpeechMissing(f"{error}; install espeak-ng and flite, or name a folder of carry.sh in {ROOT}") from None


class _Espeak:
    def __init__(self) -> None:
        self._library = library = _library("libespeak-ng.so.1")
        root = os.environ.get(ROOT)
        library.espeak_ng_InitializePath(str(Path(root, "espeak-ng-data")).encode() if root else None)
        found = ctypes.c_char_p()
        library.espeak_Info(ctypes.byref(found))
        data = Path((found.value or b"").decode())
        if not (data / SPEAKERS_FOLDER).is_dir():
            raise SpeechMissing(f"espeak-ng has no data at {data}")
        self._data = own_data(data)
        self._rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(self._data).encode(), _KEEP_RUNNING)
        if self._rate <= 0:
            raise SpeechMissing(f"espeak-ng cannot read its data at {data}")
        self._parts: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._take)  # kept: the library does not
        library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: ctypes._Pointer[ctypes.c_short], count: int, events: int | None) -> int:
        if count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def speak(self, text: str, voice: Voice) -> tuple[np.ndarray, int]:
        accent, _, speaker = voice.name.partition("+")
        if voice.variant:
            speaker = write_variant(self._data, voice.variant)
        # The library takes a speaker it does not know for none.
        if speaker and not (self._data / SPEAKERS_FOLDER / speaker).exists():
            raise SpeechMissing(f"espeak-ng has no speaker {speaker}")
        if self._library.espeak_SetVoiceByName((f"{accent}+{speaker}" if speaker else accent).encode()):
            raise SpeechMissing(f"espeak-ng has no voice {voice.name}")
        for parameter, value in (
            (_RATE, voice.words_per_minute),
            (_PITCH, voice.pitch),
            (_RANGE, voice.pitch_range),
            (_WORD_GAP, voice.word_gap),
        ):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._parts.clear()
        said = text.encode()
        self._library.espeak_Synth(said, len(said) + 1, 0, 1, 0, _UTF8, None, None)
        return np.concatenate([np.zeros(1, np.int16), *self._parts]), self._rate


class _Wave(ctypes.Structure):
    """flite's cst_wave."""

    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


class _FliteVoice(ctypes.Structure):
    """The first fields of flite's cst_voice."""

    _fields_ = (("name", ctypes.c_char_p), ("features", ctypes.c_void_p))


_FLITE_PACE = 170  # words a minute of flite's voices as they are
_FLITE_PITCH = {"kal16": 95.0, "awb": 130.0, "rms": 100.0, "slt": 170.0}  # their means, in Hz


class _Flite:
    def __init__(self) -> None:
        self._library = library = _library("libflite.so.1")
        library.flite_init()
        library.flite_text_to_wave.restype = ctypes.POINTER(_Wave)
        library.flite_text_to_wave.argtypes = [ctypes.c_char_p, ctypes.POINTER(_FliteVoice)]
        library.delete_wave.argtypes = [ctypes.POINTER(_Wave)]
        library.flite_feat_set_float.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_float]
        self._voices = {name: self._registered(name) for name in _FLITE_PITCH}

    def _registered(self, name: str) -> ctypes._Pointer[_FliteVoice]:
        register = getattr(_library(f"libflite_cmu_us_{name}.so.1"), f"register_cmu_us_{name}")
        register.restype, register.argtypes = ctypes.POINTER(_FliteVoice), [ctypes.c_char_p]
        return register(None)

    def speak(self, text: str, voice: Voice) -> tuple[np.ndarray, int]:
        own = self._voices[voice.name]
        pitch = _FLITE_PITCH[voice.name] * 1.5 ** ((voice.pitch - 50) / 50)
        for feature, value in (
            (b"duration_stretch", _FLITE_PACE / voice.words_per_minute),
            (b"int_f0_target_mean", pitch),
            (b"int_f0_target_stddev", pitch * voice.pitch_range / 400),
        ):
            self._library.flite_feat_set_float(own.contents.features, feature, value)
        wave = self._library.flite_text_to_wave(text.encode(), own)
        made = wave.contents
        samples = np.ctypeslib.as_array(made.samples, (made.num_samples,)).copy()
        rate = made.sample_rate
        self._library.delete_wave(wave)
        return samples, rate


@cache
def _espeak() -> _Espeak:
    return _Espeak()


@cache
def _flite() -> _Flite:
    return _Flite()
