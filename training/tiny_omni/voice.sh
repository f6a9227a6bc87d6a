#!/bin/sh
# Trains a voice for a model that hears, and writes the folder of the model that does both:
#
#     sh training/tiny_omni/voice.sh hearing candidate       MINUTES=10 for each of both stages
set -eu
hearing=${1:?the folder of a model that hears}
out=${2:?the folder to write}
minutes=${MINUTES:-10}
python=${PYTHON:-python}
store=$(mktemp -d)
trap 'rm -rf "$store"' EXIT
$python -m training.tiny_omni.train_codec --minutes "$minutes" --store "$store/clips.pt" --out "$out/codec"
$python -m training.tiny_omni.train_talker --minutes "$minutes" --store "$store/clips.pt" --thinker "$hearing" \
  --codec "$out/codec" --out "$out/talker"
$python -m training.tiny_omni.checkpoint --hearing "$hearing" --codec "$out/codec" --talker "$out/talker" --out "$out/model"
