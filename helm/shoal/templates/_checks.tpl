{{/* What two values demand of each other: each is one sentence that says what to do. */}}

{{- define "shoal.checks" -}}
{{- $values := .Values -}}
{{- $external := $values.etcd.external -}}
{{- $fullname := include "shoal.fullname" . -}}
{{- range $name, $program := dict "image" "controller" "workerImage" "worker" -}}
{{- if not (index $values $name).repository -}}
{{- fail (printf "%s.repository is empty, and no image is published; build deploy/%s.Dockerfile, push it to a registry that the cluster reaches, and name it" $name $program) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" $fullname) -}}
{{- fail (printf "everything would be named %s, but a service's name begins with a letter; set fullnameOverride, or give the release another name" $fullname) -}}
{{- end -}}
{{- if has $fullname (list "true" "false" "yes" "no" "on" "off" "y" "n" "null") -}}
{{- fail (printf "everything would be named %s, which YAML takes for another thing than a name; set fullnameOverride" $fullname) -}}
{{- end -}}
{{- if eq $values.store "embedded" -}}
{{- if ne (int $values.controller.replicas) 1 -}}
{{- fail (printf "controller.replicas is %d, but an embedded store can be held by one controller only; set controller.replicas to 1, or store to etcd" (int $values.controller.replicas)) -}}
{{- end -}}
{{- if $external.endpoints -}}
{{- fail "etcd.external.endpoints is given, but store is embedded; set store to etcd, or leave the endpoints out" -}}
{{- end -}}
{{- end -}}
{{- if and $values.backup.enabled (eq $values.store "embedded") -}}
{{- fail "backup.enabled is true, but store is embedded, whose volume the controller alone has; set store to etcd, or run `shoal backup` in the controller's pod" -}}
{{- end -}}
{{- if and $external.user (not $external.passwordSecret) -}}
{{- fail (printf "etcd.external.user is %s, but etcd.external.passwordSecret is empty; name the secret that has the password in its key `password`" $external.user) -}}
{{- end -}}
{{- if and $external.clientCertificate (not $external.tlsSecret) -}}
{{- fail "etcd.external.clientCertificate is true, but etcd.external.tlsSecret is empty; name the secret with ca.crt, tls.crt and tls.key" -}}
{{- end -}}
{{- if not $external.endpoints -}}
{{- range $name := list "user" "passwordSecret" "tlsSecret" -}}
{{- if get $external $name -}}
{{- fail (printf "etcd.external.%s is given, but etcd.external.endpoints is empty; name the members of your etcd, or leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.tls.source "secret") (not $values.tls.secret) -}}
{{- fail "tls.source is secret, but tls.secret is empty; name the secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and (ne $values.tls.source "secret") $values.tls.secret -}}
{{- fail (printf "tls.secret is %s, but tls.source is %s; set tls.source to secret, or leave tls.secret out" $values.tls.secret $values.tls.source) -}}
{{- end -}}
{{- if and (eq $values.tls.source "certManager") (not $values.tls.issuer.name) -}}
{{- fail "tls.source is certManager, but tls.issuer.name is empty; name an issuer of cert-manager" -}}
{{- end -}}
{{- if and $values.tls.workers (eq $values.tls.source "none") -}}
{{- fail "tls.workers is true, but tls.source is none; set tls.source to secret, generated or certManager" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) -}}
{{- fail "ingress.enabled is true, but ingress.hosts is empty; name the hosts under which REST is to be reached" -}}
{{- end -}}
{{- $monitor := $values.monitoring.serviceMonitor -}}
{{- if and $monitor.enabled (not $monitor.tokenSecret) (not $values.rbac.create) -}}
{{- fail "monitoring.serviceMonitor.enabled is true and monitoring.serviceMonitor.tokenSecret is empty, but the job that would make the token needs a role, and rbac.create is false; make a token of role view, and name the secret that has it in its key `token`" -}}
{{- end -}}
{{- range $component := list "controller" "etcd" -}}
{{- range $label := keys (index $values $component).podLabels -}}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "%s.podLabels has %s, by which the chart finds its pods; leave it out, or set nameOverride" $component $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $values.controller.env -}}
{{- if hasPrefix "SHOAL_" $name -}}
{{- fail (printf "controller.env.%s is a setting of Shoal, which the chart sets by values of its own; leave it out of controller.env" $name) -}}
{{- end -}}
{{- end -}}
{{- include "shoal.renderedOnce" . -}}
{{- if .Release.IsUpgrade -}}
{{- include "shoal.upgradeChecks" . -}}
{{- end -}}
{{- end -}}

{{/* What is made once is found again in the cluster. Where there is none to ask (Argo CD, `helm template`), each render
     would make it anew, and the next one would replace it. Every namespace has an account `default`; one that is still to
     be created has none, but then kube-system may be read. */}}
{{- define "shoal.renderedOnce" -}}
{{- $made := list -}}
{{- if not .Values.token.existingSecret -}}
{{- $made = append $made "a root token; make a secret with a token in its key `token`, and name it in token.existingSecret" -}}
{{- end -}}
{{- if eq .Values.tls.source "generated" -}}
{{- $made = append $made "certificates; set tls.source to certManager or secret" -}}
{{- end -}}
{{- if $made -}}
{{- if not (lookup "v1" "ServiceAccount" .Release.Namespace "default") -}}
{{- if not (lookup "v1" "Namespace" "" "kube-system") -}}
{{- fail (printf "there is no cluster to ask, so each render would make %s" (join ", and " $made)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What an upgrade cannot change: the jobs are in the store, and nothing carries them into another one. */}}
{{- define "shoal.upgradeChecks" -}}
{{- $etcd := .Values.etcd -}}
{{- $name := include "shoal.fullname" . -}}
{{- $anew := "delete the jobs, run helm uninstall, delete the volumes, and install anew" -}}
{{- range $container := dig "spec" "template" "spec" "containers" list (lookup "apps/v1" "Deployment" .Release.Namespace $name) -}}
{{- range $variable := $container.env -}}
{{- if eq $variable.name "SHOAL_STORE" -}}
{{- $before := include "shoal.storeName" $variable.value -}}
{{- $after := include "shoal.storeName" (include "shoal.store" $) -}}
{{- if ne $before $after -}}
{{- fail (printf "the jobs of this release are in %s, and an upgrade does not move them to %s; leave store and etcd.external as they were, or %s" $before $after $anew) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found := lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-etcd" $name) -}}
{{- if and $found (include "shoal.ownEtcd" .) -}}
{{- if ne (int $found.spec.replicas) (int $etcd.replicas) -}}
{{- fail (printf "etcd.replicas is %d, but the etcd of this release has %d members, and an upgrade neither adds nor removes one; leave etcd.replicas at %d, or %s" (int $etcd.replicas) (int $found.spec.replicas) (int $found.spec.replicas) $anew) -}}
{{- end -}}
{{- $claim := (index $found.spec.volumeClaimTemplates 0).spec -}}
{{- $size := $claim.resources.requests.storage -}}
{{- if ne (include "shoal.bytes" $size) (include "shoal.bytes" $etcd.volume.size) -}}
{{- fail (printf "etcd.volume.size is %s, but the members' volumes were made with %s, and an upgrade does not change them; leave etcd.volume.size at %s, and enlarge the claims data-%s-etcd-0 and so on where their storage class allows it" $etcd.volume.size $size $size $name) -}}
{{- end -}}
{{- $class := $claim.storageClassName | default "" -}}
{{- if ne $class $etcd.volume.storageClass -}}
{{- fail (printf "etcd.volume.storageClass is %q, but the members' volumes were made with %q, and an upgrade does not move them; leave it, or %s" $etcd.volume.storageClass $class $anew) -}}
{{- end -}}
{{- $speaks := contains "--listen-peer-urls=https" (toJson $found.spec.template.spec.containers) -}}
{{- if ne $speaks (not (empty (include "shoal.ownEtcdTls" .))) -}}
{{- fail (printf "tls.source is %s, but the members of this release's etcd know each other by addresses %s TLS, which an upgrade does not change; leave tls.source as it was, or %s" .Values.tls.source (ternary "with" "without" $speaks) $anew) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A store without what may change: the members of an etcd that is somebody's own. */}}
{{- define "shoal.storeName" -}}
{{- $prefix := regexReplaceAll "^etcd://[^/]*" . "" -}}
{{- if hasPrefix "embedded:" . -}}
an embedded store
{{- else if contains "-etcd-0." . -}}
the chart's etcd under {{ $prefix }}
{{- else -}}
an etcd of your own under {{ $prefix }}
{{- end -}}
{{- end -}}

{{/* A quantity as one number: an API server writes 8192Mi as 8Gi. */}}
{{- define "shoal.bytes" -}}
{{- $scales := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9.]+" (toString .) -}}
{{- printf "%.0f" (mulf (float64 $number) (get $scales (trimPrefix $number (toString .)) | default 1.0)) -}}
{{- end -}}
