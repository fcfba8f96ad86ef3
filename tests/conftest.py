"""Settings of the test process."""

import torch

# float32 means float32, in the baselines as in the kernels.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
