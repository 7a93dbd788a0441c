//! An engine that speaks otherwise than its sidecar was told: it is told by which
//! option that is mended.

use super::{
    config::SidecarConfig,
    engine::{EngineTrouble, body},
    link::{Link, LinkError},
};
use crate::fleet::facts::EngineKind;

pub(super) fn name(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Sglang => "SGLang",
        EngineKind::Vllm => "vLLM",
    }
}

pub(super) fn option(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Sglang => "sglang",
        EngineKind::Vllm => "vllm",
    }
}

/// The same trouble, unless the engine answers as the other kind does: then that. Asked
/// on a connection of its own, by routes that only one of the two has.
pub(super) async fn explained(config: &SidecarConfig, trouble: EngineTrouble) -> EngineTrouble {
    let may_be = matches!(
        trouble,
        EngineTrouble::Status { .. }
            | EngineTrouble::Facts(_)
            // SGLang generates a token before it answers `/health`.
            | EngineTrouble::Link(LinkError::Timeout(_))
    );
    let link = Link::new(&config.engine_url).ok().filter(|_| may_be);
    let Some(mut link) = link else {
        return trouble;
    };
    let limit = config.timing.probe_timeout;
    let mut answers = async |path| body(&mut link, path, limit).await.is_ok();
    let seems = if answers("/model_info").await {
        EngineKind::Sglang
    } else if answers("/version").await {
        EngineKind::Vllm
    } else {
        return trouble;
    };
    let told = config.engine;
    if seems == told {
        trouble
    } else {
        EngineTrouble::Dialect { told, seems }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::sim::{Dialect, SimConfig, SimEngine},
        sidecar::Sidecar,
    };

    #[tokio::test]
    async fn an_engine_of_the_other_kind_is_told_by_the_option_that_names_it() {
        for (dialect, kind) in [
            (Dialect::Sglang, EngineKind::Sglang),
            (Dialect::Vllm, EngineKind::Vllm),
        ] {
            let engine = SimEngine::start(SimConfig {
                dialect,
                page_size: 16,
                ..SimConfig::instant()
            });
            let engine = engine.await.unwrap();
            for told in [EngineKind::Sglang, EngineKind::Vllm] {
                let mut config = SidecarConfig::new("http://127.0.0.1:1", engine.url(), "r");
                config.engine = told;
                let trouble = Sidecar::new(config).unwrap().facts_or_why().await.err();
                assert_eq!(trouble.is_none(), told == kind, "{trouble:?}");
                if let Some(trouble) = trouble {
                    let (said, option) = (trouble.to_string(), option(kind));
                    assert!(said.contains(&format!("--engine {option} ")), "{said}");
                }
            }
            engine.stop().await;
        }
    }

    #[tokio::test]
    async fn another_trouble_of_the_right_engine_stays_what_it_is() {
        let engine = SimEngine::start(SimConfig::instant()).await.unwrap();
        let config = SidecarConfig::new("http://127.0.0.1:1", engine.url(), "r");
        let trouble = EngineTrouble::Status {
            path: "/v1/models",
            status: http::StatusCode::NOT_FOUND,
        };
        assert_eq!(explained(&config, trouble.clone()).await, trouble);
        engine.stop().await;
        assert_eq!(explained(&config, trouble.clone()).await, trouble);
    }
}
