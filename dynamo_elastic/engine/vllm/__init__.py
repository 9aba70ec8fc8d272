"""vLLM, seen from below Dynamo: which releases were tried, and how its processes let go of this
host before an image is made and take hold of it again. The only importer of vllm."""
