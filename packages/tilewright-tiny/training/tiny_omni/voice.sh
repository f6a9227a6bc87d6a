#!/bin/sh
# Trains hearing further and a voice for it on one GPU, and writes the folder of the whole model to out/model:
#
#     sh training/tiny_omni/voice.sh hearing out
#
# `hearing` is the folder of a model that hears. Codec and talker begin anew: first the codec, then its decoder and the
# talker at the same time, with the codes that the codec has by then. Hearing keeps the rows of its tokens, which the
# talker reads, so that neither waits for the other. What they say is in out/logs. A run that is cut short leaves the
# weights of the last minute in out/hearing, out/decoder and out/talker; `training.tiny_omni.checkpoint` makes a model
# of them.
set -eu
hearing=${1:?the folder of a model that hears}
out=${2:?the folder to write}
python=${PYTHON:-python}
hearing_minutes=${HEARING_MINUTES:-18} codec_minutes=${CODEC_MINUTES:-5}
decoder_minutes=${DECODER_MINUTES:-6} talker_minutes=${TALKER_MINUTES:-10}
workers=${WORKERS:-9} speakers=${SPEAKERS:-12} clips=${CLIPS:-40000}
mkdir -p "$out/logs"
store=$out/clips.pt

$python -m training.tiny_omni.train --start-from "$hearing" --minutes "$hearing_minutes" --lr 4e-4 \
  --workers "$workers" --out "$out/hearing" 2>"$out/logs/hearing.log" &
of_hearing=$!
$python -m training.tiny_omni.clips --clips "$clips" --workers "$speakers" --store "$store" 2>"$out/logs/clips.log"
$python -m training.tiny_omni.train_codec --minutes "$codec_minutes" --store "$store" --workers 3 \
  --out "$out/codec" 2>"$out/logs/codec.log"
$python -m training.tiny_omni.train_codec --start-from "$out/codec" --minutes "$decoder_minutes" --store "$store" \
  --workers 3 --out "$out/decoder" 2>"$out/logs/decoder.log" &
of_decoder=$!
$python -m training.tiny_omni.train_talker --minutes "$talker_minutes" --store "$store" --workers 3 \
  --thinker "$hearing" --codec "$out/codec" --out "$out/talker" 2>"$out/logs/talker.log"
wait $of_decoder || echo "the decoder stopped: see $out/logs/decoder.log"
wait $of_hearing || echo "hearing stopped: see $out/logs/hearing.log"
rm -f "$store"
$python -m training.tiny_omni.checkpoint --hearing "$out/hearing" --codec "$out/decoder" --talker "$out/talker" \
  --out "$out/model"
