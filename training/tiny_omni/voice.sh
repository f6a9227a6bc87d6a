#!/bin/sh
# Trains hearing further and a voice for it, all at the same time on one GPU, and writes the folder of the whole model:
#
#     sh training/tiny_omni/voice.sh hearing codec talker out
#
# goes on from folders of earlier runs; "-" for the talker begins anew. What it says is in out/logs. A run that is cut
# short leaves the weights of the last minute in out/hearing, out/codec and out/talker; `training.tiny_omni.checkpoint`
# makes a model of them. Codes stay those of the codec it began with, and the rows of the thinker's table theirs, so
# that none of the three has to wait for another.
set -eu
hearing=${1:?the folder of a model that hears}
codec=${2:?the folder of a codec}
talker=${3:?the folder of a talker, or -}
out=${4:?the folder to write}
python=${PYTHON:-python}
hearing_minutes=${HEARING_MINUTES:-15} codec_minutes=${CODEC_MINUTES:-9} talker_minutes=${TALKER_MINUTES:-14}
workers=${WORKERS:-7} speakers=${SPEAKERS:-8} clips=${CLIPS:-20000}
mkdir -p "$out/logs"
store=$out/clips.pt
going_on=
[ "$talker" = - ] || going_on="--start-from $talker"

$python -m training.tiny_omni.train --start-from "$hearing" --minutes "$hearing_minutes" --lr 4e-4 \
  --workers "$workers" --out "$out/hearing" 2>"$out/logs/hearing.log" &
of_hearing=$!
$python -m training.tiny_omni.clips --clips "$clips" --workers "$speakers" --store "$store" 2>"$out/logs/clips.log"
$python -m training.tiny_omni.train_talker $going_on --minutes "$talker_minutes" --store "$store" --workers 4 \
  --thinker "$hearing" --codec "$codec" --out "$out/talker" 2>"$out/logs/talker.log" &
of_talker=$!
$python -m training.tiny_omni.train_codec --start-from "$codec" --minutes "$codec_minutes" --store "$store" \
  --workers 4 --out "$out/codec" 2>"$out/logs/codec.log" || echo "the codec stopped: see $out/logs/codec.log"
wait $of_talker || echo "the talker stopped: see $out/logs/talker.log"
wait $of_hearing || echo "hearing stopped: see $out/logs/hearing.log"
rm -f "$store"
$python -m training.tiny_omni.checkpoint --hearing "$out/hearing" --codec "$out/codec" --talker "$out/talker" \
  --out "$out/model"
