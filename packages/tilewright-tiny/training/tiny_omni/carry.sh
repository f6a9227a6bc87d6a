#!/bin/sh
# Makes a folder with what speech.py needs of espeak-ng and flite, English alone, for a machine that has neither:
#
#     sh training/tiny_omni/carry.sh speech          here, with Debian's espeak-ng and flite installed and a C compiler
#     TILEWRIGHT_SPEECH_ROOT=speech python -m ...    there
set -eu
root=${1:?the folder to make}
mkdir -p "$root/lib" "$root/espeak-ng-data/lang"
path_of() { /sbin/ldconfig -p | awk -v name="$1" '$1 == name { print $NF; exit }'; }
for name in libespeak-ng.so.1 libsonic.so.0 libasound.so.2 libflite.so.1 libflite_usenglish.so.1 libflite_cmulex.so.1 \
  libflite_cmu_us_kal16.so.1 libflite_cmu_us_awb.so.1 libflite_cmu_us_rms.so.1 libflite_cmu_us_slt.so.1; do
  cp -L "$(path_of $name)" "$root/lib/$name"
done
# libpcaudio plays sounds, needs thirty other libraries, and is never called: this one has its names alone.
for name in close destroy drain flush open strerror write; do echo "void audio_object_$name(void) {}"; done |
  { cat; echo "void *create_audio_device_object(void) { return 0; }"; } |
  cc -shared -fPIC -Wl,-soname,libpcaudio.so.0 -x c - -o "$root/lib/libpcaudio.so.0"
data=$(dirname "$(path_of libespeak-ng.so.1)")/espeak-ng-data
cp "$data"/intonations "$data"/phondata "$data"/phonindex "$data"/phontab "$data"/en_dict "$root/espeak-ng-data"
cp -r "$data/voices" "$root/espeak-ng-data"
cp -r "$data/lang/gmw" "$root/espeak-ng-data/lang"
du -sh "$root"
