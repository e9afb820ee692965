"""An emulated accelerator that is not torch's own (PrivateUse1), named npu and loaded as Ascend's torch_npu is."""
