#!/usr/bin/env bash
# Prints the tables that compare zoo with other tools on this machine's CPU.
#
#   benchmarks/peers.sh FOLDER [TABLE]...
#
# TABLE is export, sessions, generation, embedding or serving; without any, all are printed. Run it in zoo's own
# environment. Each tool gets an environment of its own below FOLDER, which is kept for the next run.
set -euo pipefail

tables="export sessions generation embedding serving"
if [ $# -lt 1 ]; then
  echo "usage: benchmarks/peers.sh FOLDER [TABLE]..., TABLE is one of: $tables" >&2
  exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
chosen=${*:-$tables}
for name in $chosen; do
  case " $tables " in
    *" $name "*) ;;
    *) echo "no such table: $name: choose from $tables" >&2; exit 2 ;;
  esac
done
benchmarks=$(cd "$(dirname "$0")" && pwd)

# environment NAME PACKAGE...: prints the path of an environment with these packages.
environment() {
  local place=$folder/$1 log=$folder/$1.log
  shift
  if [ ! -e "$place/complete" ]; then
    rm -rf "$place"
    if ! { python -m venv "$place" && "$place/bin/pip" install -q "$@"; } > "$log" 2>&1; then
      echo "cannot install $*: see $log" >&2
      return 1
    fi
    touch "$place/complete"
  fi
  echo "$place"
}

# genai_environment: prints the path of the environment of OpenVINO GenAI, in which it also serves.
genai_environment() {
  local place
  place=$(environment genai "$torch" optimum-intel==2.2.0 openvino-genai==2026.4.1.0 \
    openvino-tokenizers==2026.4.1.0 nncf==3.4.0 starlette uvicorn)
  # optimum-intel asks for torchvision, which these models do not use, and whose wheel needs another build of torch.
  "$place/bin/pip" uninstall -q -y torchvision > "$folder/genai.log" 2>&1
  echo "$place"
}

torch=torch==2.13.0
optimum=optimum-onnx[onnxruntime]==0.1.0
ctranslate2=ctranslate2==4.8.5

for name in $chosen; do
  echo "## $name"
  case $name in
    export)
      optimum_place=$(environment optimum "$torch" "$optimum")
      mobius_place=$(environment mobius "$torch" mobius-onnx==0.1.0)
      python "$benchmarks/export.py" --optimum "$optimum_place" --mobius "$mobius_place"
      ;;
    sessions)
      optimum_place=$(environment optimum "$torch" "$optimum")
      mobius_place=$(environment mobius "$torch" mobius-onnx==0.1.0)
      ctranslate2_place=$(environment ctranslate2 "$ctranslate2")
      python "$benchmarks/sessions.py" --optimum "$optimum_place" --mobius "$mobius_place" \
        --ctranslate2 "$ctranslate2_place" --quantized
      ;;
    generation)
      runtimes_place=$(environment runtimes "$torch" "$optimum" "$ctranslate2" sentence-transformers==5.7.0)
      genai_place=$(genai_environment)
      python "$benchmarks/runtime.py" generation --peers "$runtimes_place" --genai "$genai_place"
      ;;
    embedding)
      runtimes_place=$(environment runtimes "$torch" "$optimum" "$ctranslate2" sentence-transformers==5.7.0)
      if [ ! -e "$folder/sentences.txt" ]; then
        python -m pip download -q --no-deps --no-binary :all: -d "$folder" vaderSentiment==3.3.2
        tar -xzOf "$folder/vaderSentiment-3.3.2.tar.gz" --wildcards '*/hutto_ICWSM_2014.tar.gz' \
          | tar -xzO --wildcards '*/movieReviewSnippets_GroundTruth.txt' | cut -f 3 > "$folder/sentences.part"
        mv "$folder/sentences.part" "$folder/sentences.txt"
      fi
      python "$benchmarks/runtime.py" embedding --sentences "$folder/sentences.txt" --peers "$runtimes_place"
      ;;
    serving)
      genai_place=$(genai_environment)
      python "$benchmarks/serving.py" load --genai "$genai_place/bin/python"
      ;;
  esac
done
