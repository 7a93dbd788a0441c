//! Requests as trainers make them.

use berth::proto::{SampleRequest, Sampling, TokenIds, sample_request::Prompt};

/// A request for `output` tokens, past any end of sequence.
pub fn request(prompt: &[u32], output: u32) -> SampleRequest {
    SampleRequest {
        prompt: Some(Prompt::TokenIds(TokenIds {
            ids: prompt.to_vec(),
        })),
        sampling: Some(Sampling {
            max_tokens: Some(output),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    }
}

/// The machine-readable reason of a refusal.
pub fn reason(status: &tonic::Status) -> String {
    use tonic_types::StatusExt;
    let details = status.get_error_details();
    let info = details.error_info();
    info.map_or(String::new(), |info| info.reason.clone())
}
