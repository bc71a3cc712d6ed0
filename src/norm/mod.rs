//! The norm test: estimators and the batch controller. Pure functions and one small serialisable
//! state; no tensors, no communication.
