// Every image: a target for each (base, stack). What is in them, and why, is in docker-bake.json, which bake reads
// beside this file:  docker buildx bake [cpu | cuda | ascend | TARGET...]        docs/images.md

variable "REGISTRY" {
  default = "mcore-bundle"
}
variable "VERSION" {
  default = "0.1.0"
}
variable "REVISION" {
  description = "The commit that the images are made from."
  default     = ""
}
variable "INPUTS" {
  description = "What `python -m tools.images fingerprint --json` prints: target -> digest of all its inputs."
  default     = "{}"
}
variable "FABRIC" {
  description = "The RDMA user libraries of the accelerator images."
  default     = "ib"
  validation {
    condition     = contains(["ib", "efa", "none"], FABRIC)
    error_message = "FABRIC must be ib, efa or none."
  }
}
variable "TORCH_INDEX" {
  description = "Where the CPU builds of torch are, for the images without CUDA; empty: pip's own index."
  default     = "https://download.pytorch.org/whl/cpu"
}
variable "CACHE" {
  description = "Where layers are cached between machines, a repository of a registry; empty: nowhere."
  default     = ""
}
variable "PLATFORM" {
  description = "Where each platform is built by itself, this one: its tags say so until an index joins them."
  default     = ""
}
variable "CI" {
  description = "Adds the attestations and writes the cache: for builders that can, and may."
  default     = false
}

// A target's name may hold no dot.
function "dashed" {
  params = [name]
  result = replace(name, ".", "-")
}
function "platform" {
  params = []
  result = replace(PLATFORM, "linux/", "-")
}
function "pin" {
  params = [stack, package]
  result = STACKS[stack].pins[package].version
}
function "source" {
  params = [stack]
  result = lookup(STACKS[stack], "source", "")
}
function "of" {
  params = [backend]
  result = [for name, stack in STACKS : name if stack.backend == backend]
}
// What a tag says: the version of the bundle, the backend or chip, torch and megatron-core. None of them moves.
function "tags" {
  params = [kind, stack, suffix]
  result = ["${REGISTRY}/${split("-", kind)[0]}:${VERSION}-${kind}-torch${pin(stack, "torch")}-mcore${pin(stack, "megatron-core")}${suffix}${platform()}"]
}
function "labels" {
  params = [target, stack, base]
  result = {
    "org.opencontainers.image.title"       = "mcore-bundle ${target}"
    "org.opencontainers.image.version"     = VERSION
    "org.opencontainers.image.revision"    = REVISION
    "org.opencontainers.image.licenses"    = "Apache-2.0"
    "org.opencontainers.image.base.name"   = BASES[base].image
    "org.opencontainers.image.base.digest" = BASES[base].digest
    "mcore-bundle.stack"                   = stack
    "mcore-bundle.versions"                = join(" ", [for name, pin in STACKS[stack].pins : "${name}==${pin.version}"])
    "mcore-bundle.inputs"                  = lookup(jsondecode(INPUTS), target, "")
  }
}
function "args" {
  params = [target, stack, base]
  result = {
    BASE        = BASES[base].image
    BASE_DIGEST = BASES[base].digest
    STACK       = stack
    REVISION    = REVISION
    INPUTS      = lookup(jsondecode(INPUTS), target, "")
  }
}
function "cache" {
  params = [target]
  result = CACHE == "" ? [] : ["type=registry,ref=${CACHE}:${target}${platform()}"]
}
function "store" {
  params = [target]
  result = CACHE == "" || !CI ? [] : ["type=registry,ref=${CACHE}:${target}${platform()},mode=max,compression=zstd"]
}

group "default" {
  targets = ["cpu"]
}
group "all" {
  targets = ["cpu", "cuda", "ascend"]
}

target "_image" {
  context   = "."
  target    = "runtime"
  attest    = CI ? ["type=provenance,mode=max", "type=sbom"] : []
}

target "cpu" {
  inherits   = ["_image"]
  dockerfile = "images/cpu/Dockerfile"
  args       = merge(args("cpu", "cpu", "cpu"), { TORCH_INDEX = TORCH_INDEX })
  labels     = labels("cpu", "cpu", "cpu")
  tags       = tags("cpu", "cpu", "")
  platforms  = CI ? BASES.cpu.platforms : null
  cache-from = cache("cpu")
  cache-to   = store("cpu")
}

// What needs nvcc, compiled once for each stack and taken by the image as its `wheelhouse`.
target "wheels" {
  name       = replace("wheels-${stack}", ".", "-")
  matrix     = { stack = of("cuda") }
  context    = "."
  dockerfile = "images/cuda/Dockerfile"
  target     = "wheels"
  args = {
    BASE         = BASES.cuda.image
    BASE_DIGEST  = BASES.cuda.digest
    BUILD_BASE   = BASES.nvcc.image
    BUILD_DIGEST = BASES.nvcc.digest
    STACK        = stack
  }
  platforms  = CI ? BASES.nvcc.platforms : null
  cache-from = cache(dashed("wheels-${stack}"))
  cache-to   = store(dashed("wheels-${stack}"))
  output     = ["type=cacheonly"]
}

target "cuda" {
  name       = replace(stack, ".", "-")
  matrix     = { stack = of("cuda") }
  inherits   = ["_image"]
  dockerfile = "images/cuda/Dockerfile"
  contexts   = { wheelhouse = "target:${dashed("wheels-${stack}")}" }
  args = merge(args(dashed(stack), stack, "cuda"), {
    BUILD_BASE   = BASES.nvcc.image
    BUILD_DIGEST = BASES.nvcc.digest
    FABRIC       = FABRIC
    EFA          = SOURCES["efa-installer"].archive
    EFA_CHECKSUM = SOURCES["efa-installer"].checksum
  })
  labels     = labels(dashed(stack), stack, "cuda")
  tags       = tags("cuda", stack, "-${FABRIC}")
  platforms  = CI ? BASES.cuda.platforms : null
  cache-from = cache(dashed(stack))
  cache-to   = store(dashed(stack))
}

target "ascend" {
  name       = replace(replace(stack, "ascend", chip), ".", "-")
  matrix     = { chip = ["ascend-a2", "ascend-a3"], stack = of("ascend") }
  inherits   = ["_image"]
  dockerfile = "images/ascend/Dockerfile"
  args = merge(args(dashed(replace(stack, "ascend", chip)), stack, chip), {
    TORCH_INDEX     = TORCH_INDEX
    MINDSPEED       = source(stack) == "" ? "none" : "source"
    SOURCE          = source(stack) == "" ? "" : "${SOURCES[source(stack)].archive}/${SOURCES[source(stack)].commit}.tar.gz"
    SOURCE_CHECKSUM = source(stack) == "" ? "" : SOURCES[source(stack)].checksum
  })
  labels     = labels(dashed(replace(stack, "ascend", chip)), stack, chip)
  tags       = tags(chip, stack, "")
  platforms  = CI ? BASES[chip].platforms : null
  cache-from = cache(dashed(replace(stack, "ascend", chip)))
  cache-to   = store(dashed(replace(stack, "ascend", chip)))
}
